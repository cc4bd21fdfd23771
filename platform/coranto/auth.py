"""The public import path of bearer tokens, which `coranto.security` implements."""

from coranto.security.oidc.client import OidcClient
from coranto.security.tokens import Auth, BearerToken, Capability, Claims, Keys, Secret, sign

__all__ = ["Auth", "BearerToken", "Capability", "Claims", "Keys", "OidcClient", "Secret", "sign"]
