"""Reports: pages and plots of runs, made from the files in their run directories."""
