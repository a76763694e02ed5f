//! Where etcd is and how to prove who we are: endpoint URLs, TLS files, credentials.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use etcd_client::{Certificate, Identity, TlsOptions};
use tonic::transport::{Endpoint as Transport, Uri};

/// A secret that no log line and no debug output shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// The secret itself, for the one call that needs it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<String> for Password {
    fn from(secret: String) -> Self {
        Self(secret)
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

/// The TLS files as the command line names them. Read again for every connection, so that a
/// renewed certificate is used without a restart.
#[derive(Clone, Debug, Default)]
pub(super) struct TlsFiles {
    pub key: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub ca: Option<PathBuf>,
}

impl TlsFiles {
    pub(super) fn any(&self) -> bool {
        self.key.is_some() || self.cert.is_some() || self.ca.is_some()
    }

    /// Reads the files. Without a CA the system's roots decide whom we trust.
    pub(super) fn load(&self) -> Result<TlsOptions, String> {
        let mut tls = match &self.ca {
            Some(ca) => TlsOptions::new().ca_certificate(Certificate::from_pem(read_pem(
                ca,
                "-etcd-cafile",
                "CERTIFICATE",
            )?)),
            None => TlsOptions::new().with_native_roots(),
        };
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let cert = read_pem(cert, "-etcd-certfile", "CERTIFICATE")?;
                let key = read_pem(key, "-etcd-keyfile", "PRIVATE KEY")?;
                tls = tls.identity(Identity::from_pem(cert, key));
            }
            (None, None) => {}
            (Some(_), None) => {
                return Err("-etcd-certfile is given without -etcd-keyfile: give both".into());
            }
            (None, Some(_)) => {
                return Err("-etcd-keyfile is given without -etcd-certfile: give both".into());
            }
        }
        Ok(tls)
    }
}

/// Reads a file that has to hold a PEM block of this label.
pub(super) fn read_pem(path: &Path, flag: &str, label: &str) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let text = fs::read(path).map_err(|error| format!("cannot read {shown} ({flag}): {error}"))?;
    let wanted = format!("{label}-----");
    if text.windows(wanted.len()).any(|window| window == wanted.as_bytes()) {
        Ok(text)
    } else {
        Err(format!("{shown} ({flag}) holds no PEM block '{label}'"))
    }
}

/// One etcd endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// `http://host:port` or `https://host:port`.
    pub url: String,
    /// Whether the URL says `https`.
    pub tls: bool,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl Endpoint {
    /// Reads one entry of `-etcd-endpoints`. An entry without a scheme is TLS if TLS files are
    /// given (specification §4.2). Errors never repeat a password that stands in the URL.
    fn parse(text: &str, tls_configured: bool) -> Result<Self, String> {
        let (tls, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((scheme, _)) => {
                return Err(format!(
                    "etcd endpoint scheme '{scheme}' is not supported: use http or https"
                ));
            }
            None => (tls_configured, text),
        };
        if rest.contains('@') {
            return Err(
                "an etcd endpoint holds a user name: use -etcd-username and -etcd-password"
                    .to_owned(),
            );
        }
        let rest = rest.trim_end_matches('/');
        let url = format!("{}://{rest}", if tls { "https" } else { "http" });
        let uri: Uri =
            url.parse().map_err(|error| format!("etcd endpoint '{text}' is not a URL: {error}"))?;
        if uri.host().is_none_or(str::is_empty) || uri.path() != "/" || uri.query().is_some() {
            return Err(format!(
                "etcd endpoint '{text}' is not usable: it has to look like http://host:port"
            ));
        }
        let host = uri.host().unwrap_or_default();
        // The URL parser takes anything for a port.
        if let Some(port) = rest.strip_prefix(host).and_then(|rest| rest.strip_prefix(':'))
            && !port.parse::<u16>().is_ok_and(|port| port != 0)
        {
            return Err(format!("etcd endpoint '{text}' has no usable port: '{port}'"));
        }
        Ok(Self { url, tls })
    }

    /// Reads the whole list and tries the TLS files out on the endpoints that will use them.
    pub(super) fn parse_all(texts: &[String], files: &TlsFiles) -> Result<Vec<Self>, String> {
        let mut endpoints = Vec::new();
        for text in texts.iter().flat_map(|text| text.split(',')).map(str::trim) {
            if text.is_empty() {
                continue;
            }
            let endpoint = Self::parse(text, files.any())?;
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        if endpoints.is_empty() {
            return Err("no etcd endpoint is given: set -etcd-endpoints".to_owned());
        }
        // Unreadable files are an error even if every endpoint is plain: they are a mistake.
        let tls = if files.any() || endpoints.iter().any(|endpoint| endpoint.tls) {
            Some(files.load()?)
        } else {
            None
        };
        for (endpoint, tls) in endpoints.iter().filter(|e| e.tls).zip(tls.iter().cycle()) {
            Transport::from_shared(endpoint.url.clone())
                .and_then(|transport| transport.tls_config(tls.clone()))
                .map_err(|error| {
                    format!("the TLS files cannot be used for {endpoint}: {}", root_cause(&error))
                })?;
        }
        Ok(endpoints)
    }
}

/// The innermost text of an error: outer layers of the gRPC stack say "transport error" only.
pub(super) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(list: &str, files: &TlsFiles) -> Result<Vec<String>, String> {
        Endpoint::parse_all(&[list.to_owned()], files)
            .map(|endpoints| endpoints.into_iter().map(|e| e.url).collect())
    }

    #[test]
    fn lists_are_split_trimmed_and_deduplicated() {
        let none = TlsFiles::default();
        assert_eq!(
            all("http://127.0.0.1:4001, http://127.0.0.1:2379/,,http://127.0.0.1:4001", &none),
            Ok(vec!["http://127.0.0.1:4001".into(), "http://127.0.0.1:2379".into()])
        );
        assert_eq!(all("10.0.0.1:2379", &none), Ok(vec!["http://10.0.0.1:2379".into()]));
        assert_eq!(all("http://[2001:db8::1]:2379", &none).unwrap().len(), 1);
        assert!(all(" , ", &none).unwrap_err().contains("-etcd-endpoints"));
    }

    #[test]
    fn no_scheme_means_tls_if_files_are_given() {
        assert!(Endpoint::parse("etcd:2379", true).unwrap().tls);
        assert!(!Endpoint::parse("etcd:2379", false).unwrap().tls);
        assert!(!Endpoint::parse("http://etcd:2379", true).unwrap().tls);
        assert!(Endpoint::parse("https://etcd:2379", false).unwrap().tls);
    }

    #[test]
    fn bad_endpoints_are_named_but_passwords_are_not() {
        for (text, word) in [
            ("ftp://h:1", "ftp"),
            ("http://", "http://"),
            ("http://h:1/v2/keys", "http://host:port"),
            ("http://h:x", "h:x"),
            ("http://h:0", "no usable port: '0'"),
            ("http://[::1]:70000", "70000"),
        ] {
            let error = Endpoint::parse(text, false).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        let error = Endpoint::parse("http://root:hunter2@h:1", false).unwrap_err();
        assert!(!error.contains("hunter2") && error.contains("-etcd-username"), "{error}");
    }

    #[test]
    fn a_password_is_never_shown() {
        assert_eq!(format!("{:?}", Password::from("hunter2".to_owned())), "[redacted]");
    }

    #[test]
    fn half_a_client_certificate_and_unreadable_files_are_errors() {
        let files = TlsFiles { cert: Some("/nonexistent/c.pem".into()), ..TlsFiles::default() };
        assert!(all("http://h:1", &files).unwrap_err().contains("-etcd-keyfile"));
        let files = TlsFiles { ca: Some("/nonexistent/ca.pem".into()), ..TlsFiles::default() };
        let error = all("http://h:1", &files).unwrap_err();
        assert!(error.contains("/nonexistent/ca.pem") && error.contains("-etcd-cafile"), "{error}");
        let files = TlsFiles { ca: Some("/proc/self/status".into()), ..TlsFiles::default() };
        assert!(all("https://h:1", &files).unwrap_err().contains("CERTIFICATE"));
    }
}
