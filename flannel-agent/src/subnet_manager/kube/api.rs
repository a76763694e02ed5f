//! Calls of the Kubernetes API: connection and time limits.
//!
//! The `kube` crate makes the client; requests and answers are our own,
//! because a typed list of nodes takes many times the memory of what we keep of it.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use http::{Method, Request, Response, header};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tower::ServiceBuilder;

use super::{
    credentials::Credentials,
    failure::{Call, Cause, Failure},
};

/// How long a connection may take to come about, TLS not counted. Short, so that a server that
/// comes back is noticed soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the first byte of an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long each further piece of an answer may take.
const PIECE_TIMEOUT: Duration = Duration::from_secs(10);
/// A dead peer is noticed after this much silence and three probes.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// How long what we sent may stay unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
/// A pooled connection is not trusted for longer.
const POOL_IDLE: Duration = Duration::from_secs(30);
/// Credentials are read anew at this age, before a token or certificate that was exchanged in time
/// runs out.
const CREDENTIALS_AGE: Duration = Duration::from_mins(1);
/// No answer may be larger: far above any page of nodes.
const LARGEST_ANSWER: usize = 256 << 20;

/// The API server.
pub(super) struct Api {
    credentials: Credentials,
    connected: RefCell<Option<Connected>>,
}

#[derive(Clone)]
struct Connected {
    client: Client,
    /// Scheme, host and port, for messages.
    server: String,
    /// When the credentials were read.
    since: Instant,
}

impl Api {
    pub(super) fn new(credentials: Credentials) -> Self {
        Self { credentials, connected: RefCell::default() }
    }

    /// GETs an object.
    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        call: Call<'_>,
        path: &str,
    ) -> Result<T, Failure> {
        let bytes = self.get_bytes(call, path).await?;
        serde_json::from_slice(&bytes).map_err(|error| self.nonsense(call, &error))
    }

    /// GETs an object as text.
    pub(super) async fn get_bytes(&self, call: Call<'_>, path: &str) -> Result<Vec<u8>, Failure> {
        let answer = self.stream(call, path).await?;
        self.read(call, answer.into_body()).await
    }

    /// Begins to GET something long.
    pub(super) async fn stream(
        &self,
        call: Call<'_>,
        path: &str,
    ) -> Result<Response<Body>, Failure> {
        let request = Request::builder().method(Method::GET).uri(path);
        self.send(call, request.body(Vec::new())).await
    }

    /// Sends a strategic merge patch and returns the object as it is then.
    pub(super) async fn patch(
        &self,
        call: Call<'_>,
        path: &str,
        body: String,
    ) -> Result<Vec<u8>, Failure> {
        let request = Request::builder()
            .method(Method::PATCH)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/strategic-merge-patch+json");
        let answer = self.send(call, request.body(body.into_bytes())).await?;
        self.read(call, answer.into_body()).await
    }

    /// An answer that makes no sense.
    pub(super) fn nonsense(&self, call: Call<'_>, error: &dyn std::fmt::Display) -> Failure {
        Failure::nonsense(&self.server(), call, error)
    }

    /// Scheme, host and port of the server, as far as known.
    pub(super) fn server(&self) -> String {
        self.connected.borrow().as_ref().map_or_else(String::new, |c| c.server.clone())
    }

    /// Lets go of all connections: what is asked next begins with fresh ones and credentials
    /// read anew.
    pub(super) fn disconnect(&self) {
        self.connected.borrow_mut().take();
    }

    async fn send(
        &self,
        call: Call<'_>,
        request: http::Result<Request<Vec<u8>>>,
    ) -> Result<Response<Body>, Failure> {
        let (mut parts, body) =
            request.map_err(|error| Failure::server(format!("{call}: {error}")))?.into_parts();
        parts.headers.insert(header::ACCEPT, header::HeaderValue::from_static("application/json"));
        parts.headers.insert(header::USER_AGENT, header::HeaderValue::from_static(USER_AGENT));
        let Connected { client, server, .. } = self.connect().await?;
        let sent = client.send(Request::from_parts(parts, Body::from(body)));
        let failure = match timeout(ANSWER_TIMEOUT, sent).await {
            Ok(Ok(answer)) if answer.status().is_success() => return Ok(answer),
            Ok(Ok(answer)) => {
                let code = answer.status().as_u16();
                let retry_after = answer
                    .headers()
                    .get(header::RETRY_AFTER)
                    .and_then(|value| value.to_str().ok()?.parse().ok())
                    .map(Duration::from_secs);
                // An error document that does not come leaves the status to speak for itself.
                let body = self.read(call, answer.into_body()).await.unwrap_or_default();
                Failure::status(&server, call, code, &body, retry_after)
            }
            Ok(Err(error)) => Failure::transport(&server, call, &error),
            Err(_) => Failure::silent(&server, call, ANSWER_TIMEOUT),
        };
        // A refusal may be about who we are: credentials that were corrected count at the next try.
        if matches!(failure.cause, Cause::Server | Cause::Unauthorized | Cause::Forbidden) {
            self.disconnect();
        }
        Err(failure)
    }

    async fn read(&self, call: Call<'_>, mut body: Body) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece(call, &mut body, PIECE_TIMEOUT).await? {
            if bytes.len() + piece.len() > LARGEST_ANSWER {
                return Err(self.nonsense(call, &"there is no end to it"));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    /// The next piece of an answer; `None` at its end.
    pub(super) async fn piece(
        &self,
        call: Call<'_>,
        body: &mut Body,
        patience: Duration,
    ) -> Result<Option<impl std::ops::Deref<Target = [u8]> + use<>>, Failure> {
        loop {
            let failure = match timeout(patience, body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(_trailers) => continue,
                },
                Ok(Some(Err(error))) => Failure::transport(&self.server(), call, &error),
                Err(_) => Failure::silent(&self.server(), call, patience),
            };
            self.disconnect();
            return Err(failure);
        }
    }

    async fn connect(&self) -> Result<Connected, Failure> {
        let known = self.connected.borrow().clone();
        if let Some(known) = known.filter(|known| known.since.elapsed() < CREDENTIALS_AGE) {
            return Ok(known);
        }
        let config = self.credentials.load().await.map_err(Failure::server)?;
        let server = config.cluster_url.authority().map_or_else(String::new, |authority| {
            // Without what may stand in front of an @.
            let host = authority.as_str().rsplit('@').next().unwrap_or_default();
            format!("{}://{host}", config.cluster_url.scheme_str().unwrap_or("http"))
        });
        let client =
            client(&config).map_err(|error| Failure::transport(&server, CREDENTIALS, &error))?;
        let connected = Connected { client, server, since: Instant::now() };
        *self.connected.borrow_mut() = Some(connected.clone());
        Ok(connected)
    }
}

const USER_AGENT: &str = concat!("flannel-agent/", env!("CARGO_PKG_VERSION"));
const CREDENTIALS: Call<'_> = Call { verb: "use", resource: "the credentials", name: "" };

/// The client of the `kube` crate without its layer of traces and retries, on connections that
/// notice a dead peer.
fn client(config: &Config) -> kube::Result<Client> {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    connector.set_keepalive_retries(Some(3));
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let https = config.rustls_https_connector_with_connector(connector)?;
    let http = HttpClient::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(https);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(tower::BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}
