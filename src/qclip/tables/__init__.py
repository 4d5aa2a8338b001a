"""Tables: files and data frames as people have them, and the inputs of a model that their columns become.

Everything is encoded by public constants: no row affects the encoding of another one.
"""

from qclip.tables.reader import read
from qclip.tables.schema import Schema
from qclip.tables.table import Table

__all__ = ["Schema", "Table", "read"]
