//! A throw-away authority and a certificate of the server.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context, Result};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::{
    ServerConfig,
    crypto::ring::default_provider,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};

/// What a TLS server and those who trust it need.
#[derive(Debug)]
pub(super) struct Certificates {
    /// The authority, PEM.
    pub authority: String,
    pub config: Arc<ServerConfig>,
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
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![server.der().clone()], private)
            .context("the server's certificate")?;
        Ok(Self { authority: certificate.pem(), config: Arc::new(config) })
    }
}
