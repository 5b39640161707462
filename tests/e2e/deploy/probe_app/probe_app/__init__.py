"""What a Grid does with unusual messages: the same questions to every one."""
