"""The commands of the command line that have many options, a module for each room that they open."""
