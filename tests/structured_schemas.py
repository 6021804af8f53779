"""A schema that is not trivial, of which every part is bounded: any output ends by itself."""

from __future__ import annotations

from typing import Any

ORDER: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "customer": {"$ref": "#/$defs/person"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"enum": ["tea", "coffee", "café au lait", "日本茶"]},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["sku", "quantity"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        },
        "priority": {"enum": ["low", "normal", "high", None]},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 24}]},
        "price": {"type": "string", "pattern": r"^[0-9]{1,4}\.[0-9]{2}$"},
        "paid": {"type": "boolean"},
    },
    "required": ["id", "customer", "items", "paid"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 16},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
# Beyond the longest output: every character of it an escape, and every token one character.
ORDER_MAX_TOKENS = 900
ORDER_PROMPT = "Write down an order of tea for a customer, as JSON."
