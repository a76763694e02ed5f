//! The server itself: TLS, one thread per connection, what it answers, and the faults.

use std::{
    io::{self, BufReader, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::{
    access::{Access, Asked},
    http::{Request, Stream, begin_chunks, chunk, end_chunks, respond},
    objects::{Objects, Patch, Snapshot, whole},
    status::Refusal,
};

const PATCH_TYPE: &str = "application/strategic-merge-patch+json";

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
    pub access: Access,
    /// Requests in their order, as `GET /path?query`.
    pub requests: Vec<String>,
    /// Grows when all watches are to be dropped.
    pub generation: u64,
    /// Grows when all watches are to end in peace.
    pub rounds: u64,
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
        while let Some(request) = Request::read(&mut stream)? {
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
            state.requests.push(request.line());
            state.fault.clone()
        };
        match fault {
            Some(Fault::Status(code)) => {
                let error = Refusal::new(code, "InternalError", "the stub was told to fail");
                respond(out, code, &error.document)?;
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
        let certified = out.conn.peer_certificates().is_some_and(|chain| !chain.is_empty());
        let answer = self.admit(request, certified).and_then(|asked| match asked.verb {
            "watch" => Ok(Answer::Watch(self.start_of_watch(request))),
            "list" => self.list(request, fault.as_ref()).map(Answer::Whole),
            "patch" => self.patch(request, asked).map(Answer::Whole),
            _ => self.get(asked).map(Answer::Whole),
        });
        match answer {
            Ok(Answer::Whole(text)) => respond(out, 200, &text)?,
            Ok(Answer::Watch(start)) => return self.watch(request, &start, out).map(|()| false),
            Err(refusal) => respond(out, refusal.code, &refusal.document)?,
        }
        Ok(true)
    }

    /// What a request asks for, if it is a good one of somebody who may.
    fn admit<'r>(&self, request: &'r Request, certified: bool) -> Result<Asked<'r>, Refusal> {
        let parts: Vec<&str> = request.path.trim_matches('/').split('/').collect();
        let asked = |verb, resource, namespace, name| Asked { verb, resource, namespace, name };
        let asked = match (request.method.as_str(), parts.as_slice()) {
            ("GET", ["api", "v1", "nodes"]) => {
                let verb = if request.asks_for("watch") { "watch" } else { "list" };
                asked(verb, "nodes", "", "")
            }
            ("GET", ["api", "v1", "nodes", name]) => asked("get", "nodes", "", *name),
            ("PATCH", ["api", "v1", "nodes", name]) => asked("patch", "nodes", "", *name),
            ("PATCH", ["api", "v1", "nodes", name, "status"]) => {
                asked("patch", "nodes/status", "", *name)
            }
            ("GET", ["api", "v1", "namespaces", namespace, "pods", name]) => {
                asked("get", "pods", *namespace, *name)
            }
            _ => {
                let text = "the server could not find the requested resource";
                return Err(Refusal::new(404, "NotFound", text));
            }
        };
        if request.header("host").is_none() {
            return Err(Refusal::bad_request("missing required Host header"));
        }
        if let Some(refusal) = self.lock().access.refusal(request, certified, asked) {
            return Err(refusal);
        }
        let accepted = request.header("accept").unwrap_or("*/*");
        let json = |range: &str| {
            let range = range.split(';').next().unwrap_or_default().trim();
            matches!(range, "application/json" | "application/*" | "*/*")
        };
        if !accepted.split(',').any(json) {
            let text = "only the following media types are accepted: application/json";
            return Err(Refusal::new(406, "NotAcceptable", text));
        }
        if request.parameter("fieldSelector").is_some() && request.selected_name().is_none() {
            return Err(Refusal::bad_request("field label not supported"));
        }
        for name in ["limit", "timeoutSeconds", "resourceVersion"] {
            if request.parameter(name).is_some_and(|text| !text.is_empty())
                && request.number(name).is_none()
            {
                return Err(Refusal::bad_request(&format!("invalid {name}")));
            }
        }
        Ok(asked)
    }

    fn get(&self, asked: Asked<'_>) -> Result<String, Refusal> {
        let Asked { resource, namespace, name, .. } = asked;
        let state = self.lock();
        match resource {
            "pods" => state.objects.pods.get(&format!("{namespace}/{name}")).map(Value::to_string),
            _ => state.objects.node(name).map(|node| whole(&node)),
        }
        .ok_or_else(|| Refusal::not_found(resource, name))
    }

    fn list(&self, request: &Request, fault: Option<&Fault>) -> Result<String, Refusal> {
        if let Some(Fault::SlowPages(pause)) = fault {
            thread::sleep(*pause);
        }
        let wanted_version = request.parameter("resourceVersion").unwrap_or_default();
        let mut limit = request.number("limit").and_then(|l| usize::try_from(l).ok()).unwrap_or(0);
        if wanted_version == "0" {
            // Answered from memory, which has no pages.
            limit = 0;
        }
        let mut state = self.lock();
        let (version, start, items) = match request.parameter("continue") {
            None => {
                if request.number("resourceVersion") > Some(state.objects.version) {
                    let text = format!(
                        "Too large resource version: {wanted_version}, current: {}",
                        state.objects.version
                    );
                    return Err(Refusal::new(504, "Timeout", &text));
                }
                let (version, items) = state.objects.snapshot(limit > 0);
                (version, 0, items)
            }
            Some(_) if !wanted_version.is_empty() => {
                return Err(Refusal::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            Some(token) => {
                if fault == Some(&Fault::ExpiredPages) {
                    state.objects.expire_pages();
                }
                let parsed = token.split_once('/').and_then(|(version, start)| {
                    Some((version.parse::<u64>().ok()?, start.parse::<usize>().ok()?))
                });
                let Some((version, start)) = parsed else {
                    return Err(Refusal::bad_request("continue key is not valid"));
                };
                let Some(items) = state.objects.snapshot_of(version) else {
                    let text = "The provided continue parameter is too old to display a \
                                consistent list result. You can start a new list without the \
                                continue parameter.";
                    return Err(Refusal::new(410, "Expired", text));
                };
                (version, start, items)
            }
        };
        drop(state);
        let items: Vec<&str> = match request.selected_name() {
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
            if request.selected_name().is_none() {
                metadata["remainingItemCount"] = json!(items.len() - end);
            }
        }
        // As in every list, what kind they are stands but once.
        let page = items.get(start..end).unwrap_or_default().join(",");
        Ok(format!(
            "{{\"kind\":\"NodeList\",\"apiVersion\":\"v1\",\"metadata\":{metadata},\"items\":[{page}]}}"
        ))
    }

    fn patch(&self, request: &Request, asked: Asked<'_>) -> Result<String, Refusal> {
        let content_type = request.header("content-type").unwrap_or_default();
        if content_type != PATCH_TYPE {
            let text = format!(
                "the body of the request was in an unknown format - accepted media types include: \
                 {PATCH_TYPE}"
            );
            return Err(Refusal::new(415, "UnsupportedMediaType", &text));
        }
        let patch = Patch {
            node: asked.name.to_owned(),
            status: asked.resource == "nodes/status",
            content_type: content_type.to_owned(),
            body: request.body.clone(),
        };
        let result = {
            let mut state = self.lock();
            state.objects.node(asked.name).map(|_| state.objects.patch(patch))
        };
        self.notify();
        match result {
            None => Err(Refusal::not_found("nodes", asked.name)),
            Some(Ok(node)) => Ok(whole(&node)),
            Some(Err(error)) => Err(Refusal::bad_request(&format!("{error:#}"))),
        }
    }

    /// Where a watch begins.
    fn start_of_watch(&self, request: &Request) -> Start {
        let mut state = self.lock();
        match request.number("resourceVersion").unwrap_or(0) {
            // From no version in particular: first everything that is there.
            0 => {
                let (_, nodes) = state.objects.snapshot(false);
                let end = state.objects.last_event();
                Start { initial: nodes, number: Some(end), from: 0, future: false }
            }
            from => {
                let number = state.objects.resume(from);
                let future = from > state.objects.version;
                Start { initial: Arc::default(), number, from, future }
            }
        }
    }

    fn watch(&self, request: &Request, start: &Start, out: &mut Stream) -> io::Result<()> {
        let bookmarks = request.asks_for("allowWatchBookmarks");
        let end =
            Instant::now() + Duration::from_secs(request.number("timeoutSeconds").unwrap_or(1800));
        let wanted = request.selected_name();
        begin_chunks(out)?;
        let Some(mut number) = start.number else {
            let text = format!("too old resource version: {}", start.from);
            let error = Refusal::new(410, "Expired", &text).document;
            chunk(out, &format!("{{\"type\":\"ERROR\",\"object\":{error}}}\n"))?;
            return end_chunks(out);
        };
        for node in start.initial.iter().filter(|node| wanted.is_none_or(|w| w == name_of(node))) {
            chunk(out, &format!("{{\"type\":\"ADDED\",\"object\":{}}}\n", whole(node)))?;
        }
        let mut state = self.lock();
        let (generation, round, period) = (state.generation, state.rounds, state.bookmarks);
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
                    if now >= end || state.rounds != round {
                        drop(state);
                        return end_chunks(out);
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
                    if start.future && event.version <= start.from {
                        continue;
                    }
                    if wanted.is_none_or(|name| name == event.name) {
                        let (kind, object) = (event.kind, whole(&event.object));
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

/// A good answer.
enum Answer {
    /// A document.
    Whole(String),
    /// Events from there on.
    Watch(Start),
}

/// Where a watch begins.
struct Start {
    /// Nodes that are told as new.
    initial: Snapshot,
    /// The running number of the last event that is not told; `None` if the history is gone.
    number: Option<u64>,
    /// The version asked for.
    from: u64,
    /// Whether there is no such version yet: then what comes before it is not told.
    future: bool,
}

fn name_of(node: &str) -> String {
    let node: Value = serde_json::from_str(node).unwrap_or_default();
    node["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

/// Says that nothing happened up to a version.
fn bookmark(version: u64) -> String {
    let metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
    let object =
        json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": {}, "status": {}});
    format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n")
}
