"""Output: text, tables and the report page. Only verbs import it."""
