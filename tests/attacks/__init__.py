"""Requests that cost more than they weigh, replayed against services with their pods' memory."""
