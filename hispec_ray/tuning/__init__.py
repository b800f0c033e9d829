"""The planner: measures what a model's exits agree on and what passes cost here, and picks drafter, exits and windows."""
