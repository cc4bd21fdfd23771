"""Bearer tokens, under the name that programs import; `coranto.security.tokens` has them."""

from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import Auth, BearerToken, Capability, Claims, Keys, Secret, sign

__all__ = ["Auth", "BearerToken", "Capability", "Claims", "Keys", "OidcClient", "Secret", "sign"]
