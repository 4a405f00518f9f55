"""The audit of two OpenAI-style servers, one that speculates and one that does not.

Outputs are drawn from both in turns, each on a seed of its own, and their laws are compared by
``outrider.audit.statistics``; at temperature 0 the outputs themselves are. Where both servers
report logprobs, those of the same token after the same tokens are compared too.

A server is not trusted: only the two URLs are asked (no redirects), a body has at most
``client.LARGEST_BODY`` bytes, every wait and the number of tries are bounded. With a log, an
audit that was broken off goes on where it was.
"""

from outrider.audit.endpoints.audit import audit_endpoints
from outrider.audit.endpoints.report import EndpointReport

__all__ = ["EndpointReport", "audit_endpoints"]
