"""Notices that this server is about to end: where they come from.

A source (:class:`~.source.NoticeSource`) waits for the word of a batch system, a cloud or a person.
Sources are entry points of the group ``jupyter_gpu_ckpt.notice_sources``, so that a package can
bring its own.
"""

from .source import Notice, NoticeSource
from .watching import GROUP, NoticeWatch

__all__ = ["GROUP", "Notice", "NoticeSource", "NoticeWatch"]
