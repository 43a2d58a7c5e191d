"""The notation of chat models: function calls and reasoning in the replies of each family."""
