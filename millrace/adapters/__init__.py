"""Models of other libraries, as what a training program takes."""
