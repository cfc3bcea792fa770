"""Pure: what is shown of objects, and which objects are made."""
