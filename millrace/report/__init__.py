"""What people see of a run when it is over: pages and pictures, made from its files."""
