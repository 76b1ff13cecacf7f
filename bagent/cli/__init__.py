"""What did the user type? One file for each command."""
