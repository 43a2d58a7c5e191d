"""Function calls and reasoning in the replies of chat models, in the format of each model family."""
