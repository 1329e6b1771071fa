"""Arrays that are divided over devices and processes."""
