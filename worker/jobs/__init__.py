"""The job types that ship; each file holds one family."""

from pgqueue.worker.jobs import data, load, network, welcome
from pgqueue.worker.jobs.base import app

__all__ = ["app", "data", "load", "network", "welcome"]
