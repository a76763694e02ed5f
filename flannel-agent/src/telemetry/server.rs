//! The HTTP servers: health port, metrics address, control socket.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fmt::Write as _,
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{oneshot, watch},
    time::{sleep, timeout},
};

use super::{Telemetry, prometheus_text, status::StateSource};

/// A client has this long to send its request's head.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections served at the same time; one more closes the oldest, so that clients that hold
/// theirs open never keep a probe out.
const MAX_CONNECTIONS: usize = 64;
/// How long requests under way may take when the server stops (specification §1.5).
const STOP_LIMIT: Duration = Duration::from_secs(3);
/// Pause after a failed accept (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Which pages a server has. Everything else is 404.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// `/healthz`, `/readyz`, `/metrics`, `/status`.
    All,
    /// `/healthz`, `/readyz`: the others have an address of their own.
    Health,
    /// `/metrics`, `/status`.
    Metrics,
    /// `/status`, `/peers`: the control socket.
    Control,
}

/// An address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} ({flag}): {reason}")]
pub struct BindError {
    /// The address.
    pub address: SocketAddr,
    /// The flag it came from.
    pub flag: &'static str,
    /// What the kernel said.
    pub reason: io::Error,
}

/// Opens a TCP port. `flag` is named in the error.
pub async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|reason| BindError { address, flag, reason })
}

/// A socket that takes connections.
pub trait Accept {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin;
    /// Waits for the next connection.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Self::Stream>>;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        self.poll_accept(cx).map_ok(|(stream, _)| stream)
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.poll_accept(cx).map_ok(|(stream, _)| stream)
    }
}

/// Serves `pages` until `stop` resolves; requests under way then get three seconds.
pub async fn serve<L: Accept>(
    listener: L,
    pages: Pages,
    telemetry: Rc<Telemetry>,
    source: Rc<dyn StateSource>,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let (stopping, stopped) = watch::channel(false);
    let mut connections = FuturesUnordered::new();
    let mut evictors: BTreeMap<u64, oneshot::Sender<()>> = BTreeMap::new();
    let mut next_id = 0_u64;
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(id) = connections.next() => {
                evictors.remove(&id);
            }
            stream = accept(&listener) => {
                if evictors.len() >= MAX_CONNECTIONS
                    && let Some((_, oldest)) = evictors.pop_first()
                {
                    // The receiver is gone only if that connection just ended by itself.
                    let _: Result<(), ()> = oldest.send(());
                }
                let (evictor, evicted) = oneshot::channel();
                let (telemetry, source) = (Rc::clone(&telemetry), Rc::clone(&source));
                let respond = async move |path: &str, headers: &HeaderMap| {
                    if path == "/status" || path == "/metrics" {
                        source.freshen().await;
                    }
                    page(pages, path, headers, &telemetry, &*source)
                };
                let id = next_id;
                let stopped = stopped.clone();
                connections.push(async move {
                    connection(stream, respond, evicted, stopped).await;
                    id
                });
                evictors.insert(id, evictor);
                next_id += 1;
            }
        }
    }
    drop(listener);
    stopping.send_replace(true);
    let rest = async { while connections.next().await.is_some() {} };
    if timeout(STOP_LIMIT, rest).await.is_err() {
        tracing::debug!("clients cut off at stop");
    }
}

/// The next connection. Fails never: it pauses and tries again.
async fn accept<L: Accept>(listener: &L) -> L::Stream {
    loop {
        match poll_fn(|cx| listener.poll_accept(cx)).await {
            Ok(stream) => return stream,
            Err(error) => {
                tracing::debug!("cannot accept a connection: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends, is evicted, or the server stops.
async fn connection<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    respond: impl AsyncFn(&str, &HeaderMap) -> Response<Full<Bytes>>,
    mut evicted: oneshot::Receiver<()>,
    mut stopped: watch::Receiver<bool>,
) {
    let respond = &respond;
    let service = service_fn(async |request: hyper::Request<hyper::body::Incoming>| {
        Ok::<_, Infallible>(respond(request.uri().path(), request.headers()).await)
    });
    let mut served = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    let mut finishing = false;
    loop {
        tokio::select! {
            result = served.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!("a client's connection ended: {error}");
                }
                return;
            }
            _ = &mut evicted => return,
            _ = stopped.wait_for(|stop| *stop), if !finishing => {
                finishing = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// The answer to a request for `path`, by whatever method.
fn page(
    pages: Pages,
    path: &str,
    headers: &HeaderMap,
    telemetry: &Telemetry,
    source: &dyn StateSource,
) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    let health = matches!(pages, Pages::All | Pages::Health);
    let metrics = matches!(pages, Pages::All | Pages::Metrics);
    let control = pages == Pages::Control;
    match path {
        "/healthz" if health => match telemetry.heartbeat.stuck() {
            None => answer(StatusCode::OK, TEXT, "flanneld is running"),
            Some((what, took)) => answer(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                format!("flanneld is stuck: {what} for {} s", took.as_secs()),
            ),
        },
        "/readyz" if health => {
            let missing = telemetry.readiness.missing();
            if missing.is_empty() {
                return answer(StatusCode::OK, TEXT, "flanneld is ready");
            }
            let mut body = "flanneld is not ready yet\n".to_owned();
            for (condition, reason) in missing {
                let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
                // Writing to a string cannot fail.
                let _ = writeln!(body, "{}: {reason}", condition.name());
            }
            answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, body)
        }
        "/metrics" if metrics => metrics_page(headers, &telemetry.metrics_text()),
        "/status" if metrics || control => json(&source.status()),
        "/peers" if control => json(&source.peers()),
        _ => answer(StatusCode::NOT_FOUND, TEXT, "404 page not found\n"),
    }
}

/// Metrics in the format the client asks for: `OpenMetrics` if it accepts that, as Prometheus does;
/// else Prometheus' older one, which every reader knows.
fn metrics_page(headers: &HeaderMap, open_metrics: &str) -> Response<Full<Bytes>> {
    const OPEN_METRICS: &str = "application/openmetrics-text";
    let mut accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepted.any(|value| value.contains(OPEN_METRICS)) {
        const FULL: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        answer(StatusCode::OK, FULL, open_metrics.to_owned())
    } else {
        let page = prometheus_text::from_open_metrics(open_metrics);
        answer(StatusCode::OK, prometheus_text::MEDIA_TYPE, page)
    }
}

fn json(value: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(mut body) => {
            body.push(b'\n');
            answer(StatusCode::OK, "application/json", body)
        }
        Err(error) => answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain; charset=utf-8",
            format!("cannot be written as JSON: {error}\n"),
        ),
    }
}

fn answer(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests;
