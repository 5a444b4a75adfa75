"""What is wrong with a config, in the words and at the places that the user wrote."""
