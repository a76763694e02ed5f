//! The server itself: TLS, HTTP/1.1, one thread per connection, and the faults.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::objects::{Objects, Patch};

/// How the server misbehaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Every request gets this status.
    Status(u16),
    /// Requests are taken and not answered; watches stay open without a word.
    Hang,
    /// Every page of a list takes that long.
    SlowPages(Duration),
    /// Pages after the first have expired by the time they are asked for.
    ExpiredPages,
}

/// Everything behind the lock.
#[derive(Debug)]
pub(super) struct State {
    pub objects: Objects,
    pub fault: Option<Fault>,
    pub tokens: BTreeSet<String>,
    /// Verbs and resources that nobody may use.
    pub denied: BTreeSet<(String, String)>,
    /// Requests in their order, as `GET /path?query`.
    pub requests: Vec<String>,
    /// Grows when all watches are to be dropped.
    pub generation: u64,
    pub bookmarks: Duration,
    pub stopping: bool,
    pub watches: usize,
}

/// What all threads share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    sockets: Mutex<Vec<TcpStream>>,
}

type Stream = StreamOwned<ServerConnection, TcpStream>;

struct Request {
    method: String,
    path: String,
    query: Vec<(String, String)>,
    token: String,
    content_type: String,
    body: String,
}

impl Shared {
    pub fn new(state: State) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new(), sockets: Mutex::default() }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes whoever waits for a change of the state.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        for socket in self.sockets.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A connection that its client closed already is just as good.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Takes connections until told to stop.
    pub fn serve(self: Arc<Self>, listener: &TcpListener, tls: &Arc<ServerConfig>) {
        while !self.lock().stopping {
            let Ok((socket, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            let (shared, tls) = (Arc::clone(&self), Arc::clone(tls));
            // How a connection ends is its client's business.
            thread::spawn(move || shared.connection(socket, tls).unwrap_or_default());
        }
    }

    fn connection(&self, socket: TcpStream, tls: Arc<ServerConfig>) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        {
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            sockets.retain(|socket| socket.take_error().is_ok() && socket.peer_addr().is_ok());
            sockets.push(socket.try_clone()?);
        }
        let tls = ServerConnection::new(tls).map_err(io::Error::other)?;
        let mut stream = BufReader::new(StreamOwned::new(tls, socket));
        while let Some(request) = read_request(&mut stream)? {
            if !self.answer(&request, stream.get_mut())? {
                break;
            }
        }
        stream.get_mut().conn.send_close_notify();
        stream.get_mut().flush()
    }

    /// Answers one request; whether the connection can be used further.
    fn answer(&self, request: &Request, out: &mut Stream) -> io::Result<bool> {
        let fault = {
            let mut state = self.lock();
            let query: Vec<_> = request.query.iter().map(|(k, v)| format!("{k}={v}")).collect();
            let line = format!("{} {}?{}", request.method, request.path, query.join("&"));
            state.requests.push(line.trim_end_matches('?').to_owned());
            state.fault.clone()
        };
        match fault {
            Some(Fault::Status(code)) => {
                respond(out, code, &status(code, "InternalError", "the stub was told to fail"))?;
                return Ok(true);
            }
            Some(Fault::Hang) => {
                let mut state = self.lock();
                while state.fault == Some(Fault::Hang) && !state.stopping {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                return Ok(false);
            }
            _ => {}
        }
        let parts: Vec<&str> = request.path.trim_matches('/').split('/').collect();
        let watch = request.parameter("watch").is_some_and(|w| w == "true" || w == "1");
        let (verb, resource, name) = match (request.method.as_str(), parts.as_slice()) {
            ("GET", ["api", "v1", "nodes"]) if watch => ("watch", "nodes", ""),
            ("GET", ["api", "v1", "nodes"]) => ("list", "nodes", ""),
            ("GET", ["api", "v1", "nodes", name]) => ("get", "nodes", *name),
            ("PATCH", ["api", "v1", "nodes", name]) => ("patch", "nodes", *name),
            ("PATCH", ["api", "v1", "nodes", name, "status"]) => ("patch", "nodes/status", *name),
            ("GET", ["api", "v1", "namespaces", _, "pods", name]) => ("get", "pods", *name),
            _ => {
                respond(out, 404, &status(404, "NotFound", "the stub has no such resource"))?;
                return Ok(true);
            }
        };
        if let Some((code, document)) = self.refusal(request, verb, resource, name) {
            respond(out, code, &document)?;
            return Ok(true);
        }
        match verb {
            "watch" => return self.watch(request, out).map(|()| false),
            "list" => self.list(request, fault.as_ref(), out)?,
            "patch" => self.patch(request, name, resource, out)?,
            _ => {
                let state = self.lock();
                let found = match resource {
                    "pods" => state.objects.pods.get(name).map(|pod| pod.to_string().into()),
                    _ => state.objects.node(name),
                };
                drop(state);
                match found {
                    Some(text) => respond(out, 200, &text)?,
                    None => respond(out, 404, &not_found(resource, name))?,
                }
            }
        }
        Ok(true)
    }

    /// Authentication and authorisation.
    fn refusal(
        &self,
        request: &Request,
        verb: &str,
        resource: &str,
        name: &str,
    ) -> Option<(u16, String)> {
        let state = self.lock();
        if !state.tokens.contains(&request.token) {
            return Some((401, status(401, "Unauthorized", "Unauthorized")));
        }
        let asked = (verb.to_owned(), resource.to_owned());
        state.denied.contains(&asked).then(|| {
            let text = format!(
                "{resource} \"{name}\" is forbidden: User \
                 \"system:serviceaccount:kube-flannel:flannel\" cannot {verb} resource \
                 \"{resource}\" in API group \"\" at the cluster scope"
            );
            (403, status(403, "Forbidden", &text))
        })
    }

    fn list(&self, request: &Request, fault: Option<&Fault>, out: &mut Stream) -> io::Result<()> {
        if let Some(Fault::SlowPages(pause)) = fault {
            thread::sleep(*pause);
        }
        let limit = request.number("limit").and_then(|l| usize::try_from(l).ok()).unwrap_or(0);
        let mut state = self.lock();
        let (version, start, items) = match request.parameter("continue") {
            None => {
                let (version, items) = state.objects.snapshot(limit > 0);
                (version, 0, items)
            }
            Some(token) => {
                if fault == Some(&Fault::ExpiredPages) {
                    state.objects.expire_pages();
                }
                let page = token.split_once('/').and_then(|(version, start)| {
                    let version = version.parse().ok()?;
                    let start: usize = start.parse().ok()?;
                    Some((version, start, state.objects.snapshot_of(version)?))
                });
                let Some(page) = page else {
                    let text = "The provided continue parameter is too old";
                    drop(state);
                    return respond(out, 410, &status(410, "Expired", text));
                };
                page
            }
        };
        drop(state);
        let wanted = request.selected_name();
        let items: Vec<&str> = match wanted {
            Some(name) => {
                let selected = items.iter().filter(|text| name_of(text) == name);
                selected.map(AsRef::as_ref).collect()
            }
            None => items.iter().map(AsRef::as_ref).collect(),
        };
        let end = if limit == 0 { items.len() } else { items.len().min(start + limit) };
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if end < items.len() {
            metadata["continue"] = json!(format!("{version}/{end}"));
            metadata["remainingItemCount"] = json!(items.len() - end);
        }
        let page = items.get(start..end).unwrap_or_default().join(",");
        let text = format!(
            "{{\"kind\":\"NodeList\",\"apiVersion\":\"v1\",\"metadata\":{metadata},\"items\":[{page}]}}"
        );
        respond(out, 200, &text)
    }

    fn patch(
        &self,
        request: &Request,
        name: &str,
        resource: &str,
        out: &mut Stream,
    ) -> io::Result<()> {
        if request.content_type != "application/strategic-merge-patch+json" {
            let text = status(415, "UnsupportedMediaType", &request.content_type);
            return respond(out, 415, &text);
        }
        let patch = Patch {
            node: name.to_owned(),
            status: resource == "nodes/status",
            content_type: request.content_type.clone(),
            body: request.body.clone(),
        };
        let result = {
            let mut state = self.lock();
            state.objects.node(name).map(|_| state.objects.patch(patch))
        };
        self.notify();
        match result {
            None => respond(out, 404, &not_found("nodes", name)),
            Some(Ok(node)) => respond(out, 200, &node),
            Some(Err(error)) => {
                respond(out, 400, &status(400, "BadRequest", &format!("{error:#}")))
            }
        }
    }

    fn watch(&self, request: &Request, out: &mut Stream) -> io::Result<()> {
        let from = request.number("resourceVersion").unwrap_or(0);
        let bookmarks = request.parameter("allowWatchBookmarks") == Some("true");
        let end =
            Instant::now() + Duration::from_secs(request.number("timeoutSeconds").unwrap_or(1800));
        let wanted = request.selected_name();
        out.write_all(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        )?;
        out.flush()?;
        let mut state = self.lock();
        let (generation, period) = (state.generation, state.bookmarks);
        let Some(mut number) = state.objects.resume(from) else {
            drop(state);
            let text = format!("too old resource version: {from}");
            let error = status(410, "Expired", &text);
            chunk(out, &format!("{{\"type\":\"ERROR\",\"object\":{error}}}\n"))?;
            return out.write_all(b"0\r\n\r\n");
        };
        state.watches += 1;
        drop(state);
        let result = (|| {
            let mut next_bookmark = Instant::now() + period;
            loop {
                let mut state = self.lock();
                let event = loop {
                    if state.stopping || state.generation != generation {
                        // In mid-air, as a broken connection ends.
                        return out.sock.shutdown(Shutdown::Both);
                    }
                    let now = Instant::now();
                    if now >= end {
                        drop(state);
                        return out.write_all(b"0\r\n\r\n");
                    }
                    if state.fault != Some(Fault::Hang) {
                        if let Some(event) = state.objects.event_after(number) {
                            break Some(event);
                        }
                        if bookmarks && now >= next_bookmark {
                            break None;
                        }
                    }
                    let pause = next_bookmark.min(end).saturating_duration_since(now);
                    let pause = pause.clamp(Duration::from_millis(10), Duration::from_secs(1));
                    let waited = self.changed.wait_timeout(state, pause);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                };
                let version = state.objects.version;
                drop(state);
                if let Some(event) = event {
                    number = event.number;
                    if wanted.is_none_or(|name| name == event.name) {
                        let (kind, object) = (event.kind, &event.object);
                        chunk(out, &format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))?;
                    }
                } else {
                    next_bookmark = Instant::now() + period;
                    chunk(out, &bookmark(version))?;
                }
            }
        })();
        self.lock().watches -= 1;
        result
    }
}

impl Request {
    fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find_map(|(key, value)| (key == name).then_some(value.as_str()))
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.parameter(name)?.parse().ok()
    }

    /// The node that a field selector names.
    fn selected_name(&self) -> Option<&str> {
        self.parameter("fieldSelector")?.strip_prefix("metadata.name=")
    }
}

fn name_of(node: &str) -> String {
    let node: Value = serde_json::from_str(node).unwrap_or_default();
    node["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

/// Reads a request; `None` when the client has closed the connection.
fn read_request(stream: &mut BufReader<Stream>) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method,
        path: path.to_owned(),
        query: query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), unescape(value)))
            .collect(),
        token: String::new(),
        content_type: String::new(),
        body: String::new(),
    };
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end();
        let Some((name, value)) = line.split_once(':') else { break };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().map_err(io::Error::other)?,
            "content-type" => value.clone_into(&mut request.content_type),
            "authorization" => {
                let token = value.strip_prefix("Bearer ").unwrap_or_default();
                token.clone_into(&mut request.token);
            }
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    request.body = String::from_utf8(body).map_err(io::Error::other)?;
    Ok(Some(request))
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let code = more.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &more[2..];
            }
            _ => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn respond(out: &mut Stream, code: u16, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {code} Stub\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    out.write_all(head.as_bytes())?;
    out.write_all(body.as_bytes())?;
    out.flush()
}

fn chunk(out: &mut Stream, text: &str) -> io::Result<()> {
    out.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())?;
    out.flush()
}

/// Says that nothing happened up to a version.
fn bookmark(version: u64) -> String {
    let metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
    let object =
        json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": {}, "status": {}});
    format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n")
}

fn status(code: u16, reason: &str, message: &str) -> String {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
    .to_string()
}

fn not_found(resource: &str, name: &str) -> String {
    status(404, "NotFound", &format!("{resource} \"{name}\" not found"))
}
