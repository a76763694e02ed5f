use std::{
    cell::Cell,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::Instant,
};

use super::*;
use crate::telemetry::{
    health::Condition,
    metrics::Metrics,
    status::{Status, StoreStatus},
};

struct Source {
    telemetry: Rc<Telemetry>,
    asked: Cell<usize>,
}

impl StateSource for Source {
    fn status(&self) -> Status {
        self.asked.set(self.asked.get() + 1);
        Status {
            store: Some(StoreStatus {
                kind: "local".into(),
                connected: true,
                detail: String::new(),
            }),
            ..self.telemetry.base_status()
        }
    }

    fn peers(&self) -> Value {
        json!([{"subnet": "10.77.3.0/24"}])
    }
}

/// Runs `client` against a server on the loopback.
async fn with_server<F: Future<Output = ()>>(
    pages: Pages,
    client: impl FnOnce(SocketAddr, Rc<Telemetry>) -> F,
) {
    let telemetry = Rc::new(Telemetry::new(Metrics::default(), |_| ()));
    let source = Rc::new(Source { telemetry: Rc::clone(&telemetry), asked: Cell::new(0) });
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into(), "--healthz-port").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = serve(listener, pages, Rc::clone(&telemetry), source, async {
        let _ = stopped.await;
    });
    let client = async move {
        client(address, telemetry).await;
        drop(stop);
    };
    tokio::join!(server, client);
}

/// Sends text, returns everything that comes until the server closes.
async fn exchange(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    // A reset instead of an orderly end is as good.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).expect("UTF-8")
}

async fn request(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let answer = exchange(address, &text).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let code = head.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a code");
    (code, body.to_owned())
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    request(address, "GET", path).await
}

#[tokio::test]
async fn health_and_readiness_as_specified() {
    with_server(Pages::All, |address, telemetry| async move {
        let running = (200, "flanneld is running".to_owned());
        assert_eq!(get(address, "/healthz").await, running);
        let (code, body) = get(address, "/readyz").await;
        assert_eq!(code, 503);
        let lines: Vec<_> = body.lines().collect();
        assert_eq!(lines[0], "flanneld is not ready yet");
        assert_eq!(lines.len(), 1 + Condition::ALL.len());

        for condition in Condition::ALL {
            telemetry.readiness.met(condition);
        }
        let ready = (200, "flanneld is ready".to_owned());
        assert_eq!(get(address, "/readyz").await, ready);
        assert_eq!(request(address, "POST", "/readyz?x=1").await, ready);
        assert_eq!(request(address, "DELETE", "/healthz").await, running);

        telemetry.readiness.unmet(Condition::Lease, "held by\n192.0.2.12");
        let (code, body) = get(address, "/readyz").await;
        assert_eq!(
            (code, body.as_str()),
            (503, "flanneld is not ready yet\nlease: held by 192.0.2.12\n")
        );
        assert_eq!(get(address, "/").await.0, 404);
        assert_eq!(get(address, "/peers").await.0, 404);
        assert_eq!(request(address, "HEAD", "/healthz").await, (200, String::new()));
    })
    .await;
}

#[tokio::test]
async fn metrics_and_status() {
    with_server(Pages::All, |address, telemetry| async move {
        telemetry.readiness.met(Condition::Lease);
        telemetry.metrics.peers_wanted.set(7);
        telemetry.metrics.repairs.inc();
        let (code, body) = get(address, "/metrics").await;
        assert_eq!(code, 200);
        for line in [
            concat!("flannel_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            "flannel_condition{condition=\"lease\"} 1",
            "flannel_condition{condition=\"config\"} 0",
            "flannel_peers_wanted 7",
            "flannel_repairs_total 1",
            "flannel_lease_expiry_timestamp_seconds 0",
            "# TYPE flannel_repairs_total counter",
        ] {
            assert!(body.lines().any(|l| l == line), "no {line} in {body}");
        }
        let (code, body) = get(address, "/status").await;
        assert_eq!(code, 200);
        let status: Status = serde_json::from_str(&body).expect("JSON");
        assert!(!status.ready);
        assert_eq!(status.missing.len(), Condition::ALL.len() - 1);
        assert_eq!(status.store.map(|s| s.kind), Some("local".to_owned()));
    })
    .await;
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    with_server(Pages::Metrics, |address, _| async move {
        for (accept, media_type, last) in [
            ("", "text/plain; version=0.0.4; charset=utf-8", "flannel_"),
            ("Accept: */*\r\n", "text/plain; version=0.0.4; charset=utf-8", "flannel_"),
            (
                "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3\r\n",
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                "# EOF",
            ),
        ] {
            let mut stream = TcpStream::connect(address).await.expect("connected");
            let head =
                format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}Connection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).await.expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.expect("an answer");
            assert!(answer.contains(&format!("content-type: {media_type}\r\n")), "{answer}");
            assert!(answer.lines().last().expect("a line").starts_with(last), "{answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn each_server_has_its_pages_only() {
    let all = ["/healthz", "/readyz", "/metrics", "/status", "/peers"];
    for (pages, here) in [
        (Pages::All, &all[..4]),
        (Pages::Health, &all[..2]),
        (Pages::Metrics, &all[2..4]),
        (Pages::Control, &all[3..]),
    ] {
        with_server(pages, |address, _| async move {
            for path in all {
                let found = get(address, path).await.0 != 404;
                assert_eq!(found, here.contains(&path), "{path} of {pages:?}");
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = bind((Ipv6Addr::LOCALHOST, 0).into(), "--healthz-port").await.expect("bound");
    let address = taken.local_addr().expect("an address");
    let error = bind(address, "--healthz-port").await.expect_err("in use").to_string();
    assert!(error.contains(&address.to_string()) && error.contains("--healthz-port"), "{error}");
}

#[tokio::test]
async fn clients_that_hold_on_keep_nobody_out() {
    with_server(Pages::Health, |address, _| async move {
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS + 20 {
            let mut stream = TcpStream::connect(address).await.expect("connected");
            stream.write_all(b"GET /healthz HT").await.expect("sent");
            held.push(stream);
        }
        assert_eq!(get(address, "/healthz").await.0, 200);
        // The oldest has been closed, the newest has not.
        let mut byte = [0];
        let closed = timeout(Duration::from_secs(1), held[0].read(&mut byte)).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
        let last = held.last_mut().expect("one");
        last.write_all(b"TP/1.1\r\nHost: x\r\n\r\n").await.expect("sent");
        assert_eq!(last.read(&mut byte).await.expect("an answer"), 1);
    })
    .await;
}

#[tokio::test]
async fn garbage_and_slow_heads_are_cut_off() {
    with_server(Pages::Health, |address, _| async move {
        let answer = exchange(address, "\x16\x03\x01 not HTTP\r\n\r\n").await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
        let huge = format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
        let answer = timeout(Duration::from_secs(5), async {
            let mut stream = TcpStream::connect(address).await.expect("connected");
            let _ = stream.write_all(huge.as_bytes()).await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8_lossy(&answer).into_owned()
        })
        .await
        .expect("cut off");
        assert!(!answer.contains("flanneld is running"), "{answer}");

        let start = Instant::now();
        exchange(address, "GET /healthz HTTP/1.1\r\nHost:").await;
        let took = start.elapsed();
        assert!(took >= HEADER_TIMEOUT && took < HEADER_TIMEOUT * 2, "{took:?}");
        assert_eq!(get(address, "/healthz").await.0, 200);
    })
    .await;
}

#[tokio::test]
async fn stopping_waits_for_nobody_beyond_the_limit() {
    let start = Instant::now();
    let held = Rc::new(std::cell::RefCell::new(None));
    let kept = Rc::clone(&held);
    with_server(Pages::Health, |address, _| async move {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(b"GET /healthz HT").await.expect("sent");
        assert_eq!(get(address, "/healthz").await.0, 200);
        *kept.borrow_mut() = Some(stream);
    })
    .await;
    assert!(held.borrow().is_some(), "the client still holds its connection");
    let took = start.elapsed();
    assert!(took < STOP_LIMIT + Duration::from_secs(2), "{took:?}");
}
