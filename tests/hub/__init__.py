"""A server that behaves like the Hub for an unmodified huggingface_hub: for tests, and for an offline demo."""

from tests.hub.repository import Repository
from tests.hub.server import HubRequest, HubServer

__all__ = ["HubRequest", "HubServer", "Repository"]
