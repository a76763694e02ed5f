//! A throw-away authority, a certificate of the server, and certificates of clients.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    server::WebPkiClientVerifier,
};

/// What a TLS server and those who trust it need.
#[derive(Debug)]
pub(super) struct Certificates {
    /// The authority, PEM.
    pub authority: String,
    pub config: Arc<ServerConfig>,
    issuer: Issuer<'static, KeyPair>,
}

impl Certificates {
    /// Makes new ones for a server at these addresses.
    pub fn new(addresses: &[IpAddr]) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = authority.self_signed(&key)?;
        let issuer = Issuer::new(authority, key);

        let server_key = KeyPair::generate()?;
        let mut server = CertificateParams::new(Vec::new())?;
        server.subject_alt_names = addresses.iter().copied().map(SanType::IpAddress).collect();
        let server = server.signed_by(&server_key, &issuer)?;

        let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(server_key.serialize_der()));
        let provider = Arc::new(default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone())?;
        // Who shows a certificate has to show a good one; who has a token needs none.
        let clients =
            WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(&provider))
                .allow_unauthenticated()
                .build()?;
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![server.der().clone()], private)
            .context("the server's certificate")?;
        Ok(Self { authority: certificate.pem(), config: Arc::new(config), issuer })
    }

    /// A client's certificate and its key, PEM.
    pub fn client(&self) -> Result<(String, String)> {
        let key = KeyPair::generate()?;
        let mut client = CertificateParams::new(Vec::new())?;
        client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        Ok((client.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()))
    }
}
