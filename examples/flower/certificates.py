"""Make the certificates of a federation: an authority, the SuperLink's certificate, and a pair of keys a SuperNode.

    python certificates.py FOLDER --hosts superlink.example.org --nodes north south west

FOLDER/ca.crt goes to everybody; FOLDER/server.* to the SuperLink; FOLDER/NODE, its private key, to that node alone, and
FOLDER/NODE.pub to whoever runs the SuperLink. FOLDER/ca.key signs further certificates: keep it offline.
A node that makes its own keys (`ssh-keygen -t ecdsa -b 384 -f NODE`) need not let its private key travel.
"""

import argparse
import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def main(folder: Path, hosts: list[str], nodes: list[str], days: int = 365) -> None:
    """Write all files; those that are private can be read by their owner only."""
    if (folder / "ca.key").exists():  # nodes trust this authority, and no other one
        raise SystemExit(f"{folder / 'ca.key'} is there already; give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    ca, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = name("lit-pfl example authority")
    authority = x509.BasicConstraints(ca=True, path_length=0)
    # A SuperLink's own processes call it at its loopback address, and check this name too.
    alternatives = x509.SubjectAlternativeName([alternative(host) for host in dict.fromkeys([*hosts, "127.0.0.1"])])
    usage = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    write(folder / "ca.crt", pem(certificate(issuer, ca, issuer, ca, days, (authority, True))))
    write(folder / "ca.key", private_pem(ca), private=True)
    signed = certificate(name(hosts[0]), server, issuer, ca, days, (alternatives, False), (usage, False))
    write(folder / "server.crt", pem(signed))
    write(folder / "server.key", private_pem(server), private=True)
    for node in nodes:
        node_keys(folder, node)


def node_keys(folder: Path, node: str) -> None:
    """Write a SuperNode's private and public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(serialization.Encoding.PEM, ssh, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write(folder / node, private, private=True)
    write(folder / f"{node}.pub", public)


def certificate(subject, key, issuer, issuer_key, days, *extensions):
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=days))
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    for extension, critical in (*extensions, (of_issuer, False)):
        builder = builder.add_extension(extension, critical)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.add_extension(own, critical=False).sign(issuer_key, hashes.SHA384())


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def pem(signed: x509.Certificate) -> bytes:
    return signed.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, *plain)


def write(path: Path, data: bytes, private: bool = False) -> None:
    path.touch(mode=0o600 if private else 0o644)
    path.write_bytes(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--hosts", nargs="+", required=True, help="names or addresses by which nodes reach the SuperLink"
    )
    parser.add_argument("--nodes", nargs="*", default=[], help="names of the nodes")
    parser.add_argument("--days", type=int, default=365, help="how long certificates hold")
    main(**vars(parser.parse_args()))
