"""Telling others that a job or a batch has ended: which addresses may be told, signed how, sent by whom."""
