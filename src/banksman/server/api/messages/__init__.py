"""What goes over the wire, both ways: one type for each body, each query and each answer.

They are decoded strictly (a member that is not known is an error), and the OpenAPI is made from them, so that what is
documented is what is taken. A file for each file of the API.

The docstring of a type is its description. The section `Attributes:` at its end describes the fields; inherited fields
are described where they are defined.
"""
