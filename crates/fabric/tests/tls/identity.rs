//! Identities: a wrong one is reported at once, with file and remedy, and no part of a key is shown.

use std::path::PathBuf;

use tensorwire_fabric_tcp::tls::{
    TlsError, TlsIdentity,
    test_certificates::{Authority, Issued, Usage, Validity, Wanted},
};

use crate::tls::authority;

struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn of(issued: &Issued) -> Self {
        let files = Self { directory: tempfile::tempdir().unwrap() };
        files.write("cert.pem", &issued.certificate);
        files.write("key.pem", &issued.key);
        files.write("ca.pem", &issued.authorities);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }

    fn load(&self) -> Result<TlsIdentity, TlsError> {
        TlsIdentity::from_files(self.path("cert.pem"), self.path("key.pem"), self.path("ca.pem"))
    }
}

fn good() -> Issued {
    authority().issue(&Wanted::worker("/job:a/replica:0/task:0")).unwrap()
}

#[test]
fn e_a_good_identity_names_its_worker_and_hides_its_key() {
    let identity = Files::of(&good()).load().unwrap();
    let shown = format!("{identity:?} {identity:#?}");
    assert!(shown.contains("tensorwire:/job:a/replica:0/task:0"), "{shown}");
    assert!(!shown.to_lowercase().contains("key"), "{shown}");
    assert_eq!(identity.certificate().uris(), ["tensorwire:/job:a/replica:0/task:0"]);
    identity.certificate().is_for_host("127.0.0.1").unwrap();
    identity.certificate().is_for_host("localhost").unwrap();
    let error = identity.certificate().is_for_host("example.org").unwrap_err();
    assert!(error.contains("subjectAltName") && error.contains("example.org"), "{error}");
}

#[test]
fn e_errors_name_the_file_and_the_remedy() {
    type Spoil = fn(&Files);
    let cases: [(&str, Spoil, &str); 7] = [
        ("cert.pem", |files| std::fs::remove_file(files.path("cert.pem")).unwrap(), "No such file"),
        ("key.pem", |files| std::fs::remove_file(files.path("key.pem")).unwrap(), "No such file"),
        ("cert.pem", |files| files.write("cert.pem", ""), "-----BEGIN CERTIFICATE-----"),
        ("key.pem", |files| files.write("key.pem", "no key"), "-----BEGIN PRIVATE KEY-----"),
        ("ca.pem", |files| files.write("ca.pem", "no CA"), "-----BEGIN CERTIFICATE-----"),
        ("ca.pem", |files| files.write("ca.pem", &"x".repeat(2 << 20)), "is it the right file"),
        ("key.pem", |files| files.write("key.pem", &good().key), "does not belong to the certificate"),
    ];
    for (file, spoil, remedy) in cases {
        let files = Files::of(&good());
        spoil(&files);
        let error = files.load().unwrap_err().to_string();
        let path = files.path(file).display().to_string();
        assert!(error.contains(&path) && error.contains(remedy), "{file}: {error}");
        assert!(!error.contains("BEGIN PRIVATE KEY-----\nM"), "{error}");
    }
}

#[test]
fn e_a_certificate_that_nobody_would_let_in_is_refused_at_once() {
    let wanted = |change: fn(&mut Wanted)| {
        let mut wanted = Wanted::worker("/a");
        change(&mut wanted);
        authority().issue(&wanted).unwrap()
    };
    let mut foreign = good();
    foreign.authorities = Authority::new().unwrap().pem().to_owned();
    for (issued, remedy) in [
        (wanted(|it| it.validity = Validity::Past), "has expired: renew it"),
        (wanted(|it| it.validity = Validity::Future), "is not valid yet"),
        (wanted(|it| it.usage = Usage::Client), "serverAuth and clientAuth"),
        (wanted(|it| it.usage = Usage::Server), "serverAuth and clientAuth"),
        (foreign, "signed by no CA that is trusted here"),
    ] {
        let files = Files::of(&issued);
        let error = files.load().unwrap_err();
        assert!(matches!(error, TlsError::Unusable { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("cert.pem") && text.contains(remedy), "{text}");
    }
}
