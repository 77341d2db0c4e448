"""Networks of other libraries as networks of calcvm."""
