//! TLS, with certificates made here.

use crate::servers::{Server, free_ports, run};
use heatsink::store::{RedisStore, Store};
use heatsink::testing::conformance;
use heatsink::{ErrorKind, Key};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::path::{Path, PathBuf};

/// An authority, and a key signed by it.
struct Signed {
    authority: String,
    certificate: String,
    key: String,
}

fn sign() -> Signed {
    let authority_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    // Of its own name, or what it signs looks as if it had signed itself.
    params.distinguished_name.push(DnType::CommonName, "the authority of a test");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&authority_key).unwrap().pem();
    let issuer = Issuer::new(params, authority_key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap().pem();
    Signed { authority, certificate, key: key.serialize_pem() }
}

/// The server's files. Dropped, they are gone.
struct Folder(PathBuf);

impl Folder {
    fn new(signed: &Signed) -> Folder {
        let name = format!("heatsink-redis-tls-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("ca"), &signed.authority).unwrap();
        std::fs::write(dir.join("cert"), &signed.certificate).unwrap();
        std::fs::write(dir.join("key"), &signed.key).unwrap();
        Folder(dir)
    }

    fn file(&self, name: &str) -> String {
        let path: &Path = &self.0.join(name);
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[test]
fn tls_works_with_the_right_certificates_and_with_no_others() {
    run(async {
        let (signed, other) = (sign(), sign());
        let folder = Folder::new(&signed);
        let port = free_ports(1)[0];
        let files = ["cert", "key", "ca"].map(|name| folder.file(name));
        // The server asks for a certificate of the client's too, as is its default.
        let server = Server::start(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &files[0],
            "--tls-key-file",
            &files[1],
            "--tls-ca-cert-file",
            &files[2],
        ]);
        let url = format!("rediss://127.0.0.1:{port}");
        let known = RedisStore::builder(&url)
            .root_certificate(signed.authority.clone())
            .client_certificate(signed.certificate.clone(), signed.key.clone());
        let text = format!("{known:?}");
        assert!(!text.contains("PRIVATE"), "{text}");

        let store = known.connect().await.unwrap();
        conformance(store.clone(), "t:").await.assert_passed();
        // Its connections are made again as any others.
        let _: i64 = server.control().ask("CLIENT KILL TYPE normal SKIPME yes");
        let key = Key::from("k");
        while store.put(&key, "v".into(), None).await.is_err() {}
        assert_eq!(store.get(&key).await.unwrap().unwrap().bytes, "v");

        for (what, builder) in [
            ("an authority that nobody trusts", RedisStore::builder(&url)),
            (
                "another authority",
                RedisStore::builder(&url).root_certificate(other.authority.clone()),
            ),
            (
                "a name that is not in the certificate",
                RedisStore::builder(&url.replace("127.0.0.1", "localhost"))
                    .root_certificate(signed.authority.clone())
                    .client_certificate(signed.certificate.clone(), signed.key.clone()),
            ),
            (
                "a client's certificate of another authority",
                RedisStore::builder(&url)
                    .root_certificate(signed.authority.clone())
                    .client_certificate(other.certificate.clone(), other.key.clone()),
            ),
        ] {
            let e = builder.connect().await.expect_err(what);
            assert!(!e.is_unknown(), "{what}: {e:?}");
        }
        for wrong in [
            RedisStore::builder(&server.url()).root_certificate(signed.authority.clone()),
            RedisStore::builder(&url).root_certificate("no certificate"),
        ] {
            assert_eq!(wrong.connect().await.unwrap_err().kind(), ErrorKind::Config);
        }
    });
}
