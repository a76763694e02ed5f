//! HTTP/1.1 as far as the stub speaks it: requests in, answers and chunks out.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
};

use rustls::{ServerConnection, StreamOwned};

/// A connection.
pub(super) type Stream = StreamOwned<ServerConnection, TcpStream>;

/// A request.
#[derive(Debug, Default)]
pub(super) struct Request {
    pub method: String,
    pub path: String,
    pub query: Vec<(String, String)>,
    /// Headers by their names in lower case.
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Request {
    /// Reads one; `None` when the client has closed the connection.
    pub fn read(stream: &mut BufReader<Stream>) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        let method = words.next().unwrap_or_default().to_owned();
        let target = words.next().unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut request = Self {
            method,
            path: path.to_owned(),
            query: query
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .map(|(key, value)| (key.to_owned(), unescape(value)))
                .collect(),
            ..Self::default()
        };
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            request.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let length = request.header("content-length").unwrap_or("0");
        let mut body = vec![0; length.parse().map_err(io::Error::other)?];
        stream.read_exact(&mut body)?;
        request.body = String::from_utf8(body).map_err(io::Error::other)?;
        Ok(Some(request))
    }

    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|(key, value)| (key == name).then_some(value.as_str()))
    }

    /// A parameter of the query.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find_map(|(key, value)| (key == name).then_some(value.as_str()))
    }

    /// The same, if it is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.parameter(name)?.parse().ok()
    }

    /// Whether a parameter is a yes.
    pub fn asks_for(&self, name: &str) -> bool {
        matches!(self.parameter(name), Some("true" | "1"))
    }

    /// The node that a field selector names.
    pub fn selected_name(&self) -> Option<&str> {
        self.parameter("fieldSelector")?.strip_prefix("metadata.name=")
    }

    /// Method, path and parameters, without escapes.
    pub fn line(&self) -> String {
        let query: Vec<_> = self.query.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let line = format!("{} {}?{}", self.method, self.path, query.join("&"));
        line.trim_end_matches('?').to_owned()
    }
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

/// Sends a whole answer.
pub(super) fn respond(out: &mut Stream, code: u16, body: &str) -> io::Result<()> {
    // Who is told to slow down is told for how long.
    let retry = if code == 429 { "Retry-After: 1\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {code} Stub\r\nContent-Type: application/json\r\n{retry}Content-Length: {}\r\n\r\n",
        body.len()
    );
    out.write_all(head.as_bytes())?;
    out.write_all(body.as_bytes())?;
    out.flush()
}

/// Begins an answer that comes in pieces.
pub(super) fn begin_chunks(out: &mut Stream) -> io::Result<()> {
    out.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
    )?;
    out.flush()
}

/// Sends a piece.
pub(super) fn chunk(out: &mut Stream, text: &str) -> io::Result<()> {
    out.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())?;
    out.flush()
}

/// Sends the end of an answer in pieces.
pub(super) fn end_chunks(out: &mut Stream) -> io::Result<()> {
    out.write_all(b"0\r\n\r\n")
}
