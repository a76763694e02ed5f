//! Reading what an old flannel kept with etcd's v2 API (specification §4.10).
//!
//! One tree is read, once, by HTTP: nothing that is worth a client library.

use std::{sync::Arc, time::Duration};

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, StatusCode, Uri,
    body::Bytes,
    client::conn::http1,
    header::{AUTHORIZATION, HOST},
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};

use super::endpoint::{Endpoint, Password, TlsFiles, read_pem, root_cause};

/// How long one endpoint may take for everything.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest answer we accept, in bytes: some 100 000 leases.
const MAX_ANSWER: usize = 64 << 20;

/// etcd's error code for a key that is not there.
const KEY_NOT_FOUND: u32 = 100;

/// A node of the v2 tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    /// Full path, with a leading slash.
    pub key: String,
    /// Text; empty for a directory.
    pub value: String,
    /// Whether it is a directory.
    pub dir: bool,
    /// Seconds until it runs out, if it does.
    pub ttl: Option<i64>,
    /// What is in the directory.
    pub nodes: Vec<Self>,
}

/// An answer, or an error in its place.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Answer {
    node: Option<Node>,
    error_code: Option<u32>,
    message: String,
}

/// Reads the tree below `path` (`/coreos.com/network`) from the first endpoint that gives it, as a
/// quorum has it. `None` if there is no such key.
///
/// # Errors
/// One sentence per endpoint tried.
pub(super) async fn read(
    endpoints: &[Endpoint],
    tls: &TlsFiles,
    user: Option<&(String, Password)>,
    path: &str,
) -> Result<Option<Node>, String> {
    let mut failures = Vec::new();
    for endpoint in endpoints {
        let read = timeout(PATIENCE, read_from(endpoint, tls, user, path)).await;
        let seconds = PATIENCE.as_secs();
        match read.unwrap_or_else(|_| Err(format!("does not answer within {seconds} s"))) {
            Ok(found) => return Ok(found),
            Err(why) => failures.push(format!("etcd endpoint {endpoint} {why}")),
        }
    }
    Err(failures.join("; "))
}

async fn read_from(
    endpoint: &Endpoint,
    tls: &TlsFiles,
    user: Option<&(String, Password)>,
    path: &str,
) -> Result<Option<Node>, String> {
    let uri: Uri = endpoint.url.parse().map_err(|err| format!("is no URL: {err}"))?;
    let host = uri.host().unwrap_or_default();
    let port = uri.port_u16().unwrap_or(if endpoint.tls { 443 } else { 80 });
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((bare, port))
        .await
        .map_err(|err| format!("cannot be connected to: {err}"))?;
    let mut request = Request::get(format!("/v2/keys{}?recursive=true&quorum=true", encode(path)))
        .header(HOST, uri.authority().map_or(host, |authority| authority.as_str()));
    if let Some((name, password)) = user {
        let pair = format!("{name}:{}", password.reveal());
        request = request.header(AUTHORIZATION, format!("Basic {}", base64(pair.as_bytes())));
    }
    let request = request.body(Empty::new()).map_err(|err| format!("cannot be asked: {err}"))?;
    let (status, body) = if endpoint.tls {
        let name = ServerName::try_from(bare.to_owned())
            .map_err(|err| format!("has no name to check a certificate by: {err}"))?;
        let connector = TlsConnector::from(Arc::new(client_config(tls)?));
        let stream = connector
            .connect(name, stream)
            .await
            .map_err(|err| format!("fails at the TLS handshake: {}", root_cause(&err)))?;
        ask(stream, request).await?
    } else {
        ask(stream, request).await?
    };
    understand(status, &body)
}

async fn ask(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Empty<Bytes>>,
) -> Result<(StatusCode, Bytes), String> {
    let failed = |err: &hyper::Error| format!("breaks off: {}", root_cause(err));
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|err| failed(&err))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|err| failed(&err))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|err| format!("breaks off: {err}"))?;
        Ok((status, body.to_bytes()))
    };
    tokio::pin!(connection);
    tokio::select! {
        result = exchange => result,
        // Its end before the answer's is told by the exchange as well, with better words.
        result = &mut connection => Err(match result {
            Ok(()) => "closes the connection".to_owned(),
            Err(err) => failed(&err),
        }),
    }
}

/// What etcd's answer says.
fn understand(status: StatusCode, body: &[u8]) -> Result<Option<Node>, String> {
    let answer: Option<Answer> = serde_json::from_slice(body).ok();
    match (status, answer) {
        (StatusCode::OK, Some(Answer { node: Some(node), .. })) => Ok(Some(node)),
        (_, Some(Answer { error_code: Some(KEY_NOT_FOUND), .. })) => Ok(None),
        (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => Err(
            "does not let us read with the v2 API: give --etcd-username and --etcd-password of a \
             v2 user who may"
                .to_owned(),
        ),
        (StatusCode::NOT_FOUND, _) => Err(
            "has no v2 API: start etcd with --enable-v2 (3.4 and 3.5 have it, later ones do not)"
                .to_owned(),
        ),
        (_, Some(Answer { error_code: Some(code), message, .. })) => {
            Err(format!("refuses: {message} (v2 error {code})"))
        }
        _ => Err(format!("answers with HTTP status {status} and nothing of the v2 API")),
    }
}

fn client_config(files: &TlsFiles) -> Result<ClientConfig, String> {
    let bad = |what: &str, err: &dyn std::fmt::Display| format!("cannot be used: {what}: {err}");
    let mut roots = RootCertStore::empty();
    if let Some(path) = &files.ca {
        let pem = read_pem(path, "-etcd-cafile", "CERTIFICATE")?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|err| bad("-etcd-cafile", &err))?;
            roots.add(certificate).map_err(|err| bad("-etcd-cafile", &err))?;
        }
    } else {
        // Those that cannot be read are as good as not there.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let config = ClientConfig::builder().with_root_certificates(roots);
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else {
        return Ok(config.with_no_client_auth());
    };
    let chain = read_pem(cert, "-etcd-certfile", "CERTIFICATE")?;
    let chain = CertificateDer::pem_slice_iter(&chain).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|err| bad("-etcd-certfile", &err))?;
    let key = read_pem(key, "-etcd-keyfile", "PRIVATE KEY")?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|err| bad("-etcd-keyfile", &err))?;
    config
        .with_client_auth_cert(chain, key)
        .map_err(|err| bad("-etcd-certfile and -etcd-keyfile", &err))
}

/// A path with all but the plainest characters escaped (RFC 3986 section 2.1).
fn encode(path: &str) -> String {
    let escaped = path.bytes().map(|byte| {
        let plain = byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
        if plain { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    });
    escaped.collect()
}

/// Standard base64 with padding (RFC 4648 section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            out.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_in_the_rfc() {
        for (text, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
    }

    #[test]
    fn a_path_is_escaped() {
        assert_eq!(encode("/coreos.com/net-work"), "/coreos.com/net-work");
        assert_eq!(encode("/a b?c#%"), "/a%20b%3Fc%23%25");
    }

    #[test]
    fn etcds_answers_are_understood() {
        let tree = br#"{"action":"get","node":{"key":"/n","dir":true,"nodes":[
            {"key":"/n/config","value":"{}","modifiedIndex":4},
            {"key":"/n/a","value":"x","expiration":"2026-01-01T00:00:00Z","ttl":86000}]}}"#;
        let node = understand(StatusCode::OK, tree).expect("good").expect("there");
        assert!(node.dir && node.nodes.len() == 2);
        assert_eq!((node.nodes[0].ttl, node.nodes[1].ttl), (None, Some(86000)));
        let missing = br#"{"errorCode":100,"message":"Key not found","cause":"/n","index":3}"#;
        assert_eq!(understand(StatusCode::NOT_FOUND, missing), Ok(None));
        for (status, body, word) in [
            (StatusCode::NOT_FOUND, &b"404 page not found"[..], "--enable-v2"),
            (StatusCode::UNAUTHORIZED, br#"{"message":"Insufficient credentials"}"#, "username"),
            (StatusCode::OK, b"<html>", "200"),
            (StatusCode::OK, b"[]", "200"),
            (StatusCode::INTERNAL_SERVER_ERROR, br#"{"errorCode":300,"message":"Raft"}"#, "Raft"),
        ] {
            let error = understand(status, body).expect_err(word);
            assert!(error.contains(word), "{error}");
        }
    }
}
