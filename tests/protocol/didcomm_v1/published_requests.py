"""Published DIDs and requests of released libraries, and requests in their forms that tests sign."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mediatord.protocol import encoding
from mediatord.protocol.didcomm_v1.did_exchange import make_signed_attachment
from mediatord.protocol.didcomm_v1.keys import SigningKey, encode_base58_key
from mediatord.protocol.didcomm_v1.message import V1Message, parse_message

# A test of Credo, packages/core/src/modules/dids/methods/peer/__tests__/peerDidNumAlgo2.test.ts.
CREDO_PEER_2 = (
    "did:peer:2.Vz6MkqRYqQiSgvZQdnBytw86Qbs2ZWUkGv22od935YF4s8M7V"
    ".Ez6LSpSrLxbAhg2SHwKk7kwpsH7DM7QjFS5iK6qP87eViohud"
    ".SeyJzIjoiaHR0cHM6Ly9leGFtcGxlLmNvbS9lbmRwb2ludCIsInQiOiJkaWQtY29tbXVuaWNhdGlvbiIsInByaW9yaXR5IjowLCJyZWNpcGllbnR"
    "LZXlzIjpbIiNrZXktMSJdLCJyIjpbImRpZDprZXk6ejZNa3BUSFI4Vk5zQnhZQUFXSHV0MkdlYWRkOWpTd3VCVjh4Um9BbndXc2R2a3RII3o2TWtw"
    "VEhSOFZOc0J4WUFBV0h1dDJHZWFkZDlqU3d1QlY4eFJvQW53V3Nkdmt0SCJdfQ"
)
CREDO_PEER_2_KEY = "did:key:z6MkqRYqQiSgvZQdnBytw86Qbs2ZWUkGv22od935YF4s8M7V"
CREDO_PEER_2_ROUTING_KEY = "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH"

# A fixture of Credo, didPeer4zQmUJdJ.json.
CREDO_PEER_4 = (
    "did:peer:4zQmZJVsg5xdo5gVX3HCEvwp29MxrCMvnBnPM2TTYqXjLseo:z72PjTR6nroWmhFJuXs5WUQ8NxVGvXQSLQKxsztQRxqcbNMndPt2GXVKX"
    "3fjbRX9h9qfjZWUBvvnmceMz1hyvdfdBnADMJQNeCcdivUypvyiFWkgq8DCTkjcQkjZqc7dubX5E8cd2npbrXbfmkw9sRPGi7vFxfdLCKiskUW2mpks"
    "EXwXvxZ8VFd56ZPqfStaajERmqiSU9vSxWfXC8SrwbcaHWm9KAWE5yYHKvUCtNqDB7VxNw5ApwkqpLajn58UANRHgCz2yf5bTvfRCWuUtdFe3n8aroc"
    "6chpMtS6j3RwxsL12kSjnWm24vEdsqq3KbGVanLeEFQ1HjKBFxwRsJrxGfT7wVPUbKu7hWemuf6cz2tZ5kPhAHVxWjahHNTATZXKzM8oDEn3PYC34pj"
    "kgZP6BeLeeAyK1hzcjCghaN6bdpTbYhSUqWKi6oaccX11gS6JLAt1ryUzG3sCeurVTUVrf1GntJpGkiPWRQhU66MpT4K7L7kZgrmcF8eL95pSbtZqhk"
    "QCyrsurKaVmNfwrCfNRr9JzxnXprbmjs4tikDVfSBk4TkDKcXck1YkZ6CjA8S1yHWKo7pGGfw3425SGAfXXLrYA29tAaQyxDKGjsFWorwKMUGdRA8ps"
    "ZgnFptcrwi1moAdn7cTExBFPr9PSk"
)
CREDO_PEER_4_VERKEY = "7H8ScGrunfcGBwMhhRakDMYguLAWiNWhQ2maYH84J8fE"

# A test of ACA-Py, protocols/didexchange/v1_0/tests/test_manager.py.
ACAPY_REQUEST: dict[str, Any] = {
    "@type": "https://didcomm.org/didexchange/1.0/request",
    "@id": "fe838693-d51d-4225-a52b-30c38c2ec396",
    "~thread": {
        "thid": "fe838693-d51d-4225-a52b-30c38c2ec396",
        "pthid": "09dce45f-aeff-4101-bee1-5a577a11d30f",
    },
    "label": "Robert Sr",
    "did": "BsXa64NdRhXhRM3uDWwT45",
    "did_doc~attach": {
        "@id": "8c0a141c-a394-4c1b-86a7-122fc0ce383e",
        "mime-type": "application/json",
        "data": {
            "base64": (
                "eyJAY29udGV4dCI6ICJodHRwczovL3czaWQub3JnL2RpZC92MSIsICJpZCI6ICJkaWQ6c292OkJzWGE2NE5kUmhYaFJNM3VEV3dUNDUiL"
                "CAicHVibGljS2V5IjogW3siaWQiOiAiZGlkOnNvdjpCc1hhNjROZFJoWGhSTTN1RFd3VDQ1IzEiLCAidHlwZSI6ICJFZDI1NTE5VmVyaW"
                "ZpY2F0aW9uS2V5MjAxOCIsICJjb250cm9sbGVyIjogImRpZDpzb3Y6QnNYYTY0TmRSaFhoUk0zdURXd1Q0NSIsICJwdWJsaWNLZXlCYXN"
                "lNTgiOiAiNnZmQ3B5dWF2dHdDS0xKSlFocjV4TmNhVGVaYUx5b3RjVWRlYlN3UWVzWTkifV0sICJhdXRoZW50aWNhdGlvbiI6IFt7InR5"
                "cGUiOiAiRWQyNTUxOVNpZ25hdHVyZUF1dGhlbnRpY2F0aW9uMjAxOCIsICJwdWJsaWNLZXkiOiAiZGlkOnNvdjpCc1hhNjROZFJoWGhST"
                "TN1RFd3VDQ1IzEifV0sICJzZXJ2aWNlIjogW3siaWQiOiAiZGlkOnNvdjpCc1hhNjROZFJoWGhSTTN1RFd3VDQ1O2luZHkiLCAidHlwZS"
                "I6ICJJbmR5QWdlbnQiLCAicHJpb3JpdHkiOiAwLCAicmVjaXBpZW50S2V5cyI6IFsiNnZmQ3B5dWF2dHdDS0xKSlFocjV4TmNhVGVaYUx"
                "5b3RjVWRlYlN3UWVzWTkiXSwgInNlcnZpY2VFbmRwb2ludCI6ICJodHRwOi8vcm9iZXJ0OjMwMDAifV19"
            ),
            "jws": {
                "header": {"kid": "did:key:z6MkkNvFREA2GSRfRq916GovoUAaHDqRks4FJVYaRiuRa6KX"},
                "protected": (
                    "eyJhbGciOiAiRWREU0EiLCAia2lkIjogImRpZDprZXk6ejZNa2tOdkZSRUEyR1NSZlJxOTE2R292b1VBYUhEcVJrczRGSlZZYVJpdV"
                    "JhNktYIiwgImp3ayI6IHsia3R5IjogIk9LUCIsICJjcnYiOiAiRWQyNTUxOSIsICJ4IjogIldBbHFNYk5lLUVsRk1jQU1NSm1uR3Iw"
                    "enhHUVR0TXlCU2lFcnhHT1NuazQiLCAia2lkIjogImRpZDprZXk6ejZNa2tOdkZSRUEyR1NSZlJxOTE2R292b1VBYUhEcVJrczRGSl"
                    "ZZYVJpdVJhNktYIn19"
                ),
                "signature": "JEROrpnqqHMWbxV8d3fl5MYVPVZuS2vT44esf0dbYnV5BYsv5U25qoeFUuPspq2DXdWb4xDV0J8mFhq8gpz1Ag",
            },
        },
    },
}
ACAPY_VERKEY = "6vfCpyuavtwCKLJJQhr5xNcaTeZaLyotcUdebSwQesY9"


def parse(message: Mapping[str, Any]) -> V1Message:
    """A message, as if it had been received."""
    return parse_message(encoding.dumps(dict(message)))


def make_peer_document(key: SigningKey, endpoint: str = "didcomm:transport/queue") -> dict[str, Any]:
    """The document of a did:peer in the form of Credo, without an id."""
    return {
        "@context": ["https://w3id.org/did/v1"],
        "authentication": [
            {
                "id": "#key-1",
                "controller": "#id",
                "type": "Ed25519VerificationKey2018",
                "publicKeyBase58": encode_base58_key(key.did_key),
            }
        ],
        "service": [
            {
                "id": "#inline-0",
                "type": "did-communication",
                "priority": 0,
                "recipientKeys": ["#key-1"],
                "routingKeys": [],
                "serviceEndpoint": endpoint,
            }
        ],
    }


def make_peer_1_request(key: SigningKey, signer: SigningKey | None = None, **changed: Any) -> dict[str, Any]:
    """
    A request with a did:peer:1 and a signed document.

    :param signer: of the document, if not its own key.
    :param changed: members of the document.
    """
    document = {**make_peer_document(key), **changed}
    did = f"did:peer:1{encoding.encode_multihash(encoding.dumps(document))}"
    content = encoding.dumps({"id": did, **document})
    return {
        "@type": "https://didcomm.org/didexchange/1.1/request",
        "@id": "request-0001",
        "~thread": {"thid": "request-0001", "pthid": "invitation-0001"},
        "did": did,
        "did_doc~attach": {"@id": "doc", **make_signed_attachment(content, "application/json", signer or key)},
    }
