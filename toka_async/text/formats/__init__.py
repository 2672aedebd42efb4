"""What models write beside plain text: reasoning and tool calls, in the format of each family."""
