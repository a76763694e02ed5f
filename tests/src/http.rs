//! As much of HTTP/1.1 as the lab needs: one request per connection.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};

/// How long each step of a request may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// `GET path` from `ip:port`.
pub fn get(address: &str, path: &str) -> Result<Response> {
    exchange(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"),
    )
}

/// `POST path` with a JSON body, and an `Authorization` header if there is a token.
pub fn post(address: &str, path: &str, token: Option<&str>, body: &str) -> Result<Response> {
    let authorization =
        token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
    exchange(
        address,
        &format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{authorization}\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ),
    )
}

/// `PUT path` with a body of this type, and an `Authorization` header if there is one.
pub fn put(
    address: &str,
    path: &str,
    authorization: Option<&str>,
    content_type: &str,
    body: &str,
) -> Result<Response> {
    let authorization =
        authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
    exchange(
        address,
        &format!(
            "PUT {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{authorization}\
             Content-Type: {content_type}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ),
    )
}

fn exchange(address: &str, request: &str) -> Result<Response> {
    let socket: SocketAddr = address.parse().with_context(|| format!("{address} is no address"))?;
    let mut stream = TcpStream::connect_timeout(&socket, PATIENCE)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(|| format!("no answer from {address}"))?;
    parse(&answer).with_context(|| format!("answer of {address}"))
}

fn parse(answer: &[u8]) -> Result<Response> {
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .context("the answer has no end of header")?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let mut body = answer[end + 4..].to_vec();
    let status = head
        .split_whitespace()
        .nth(1)
        .and_then(|code| code.parse().ok())
        .with_context(|| format!("no status in {head}"))?;
    let chunked = head.lines().any(|line| {
        let line = line.to_ascii_lowercase();
        line.starts_with("transfer-encoding:") && line.contains("chunked")
    });
    if chunked {
        body = join_chunks(&body)?;
    }
    Ok(Response { status, body: String::from_utf8_lossy(&body).into_owned() })
}

fn join_chunks(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|w| w == b"\r\n").context("a chunk without a length")?;
        let text = String::from_utf8_lossy(&rest[..end]);
        let digits = text.split(';').next().unwrap_or_default().trim();
        let length =
            usize::from_str_radix(digits, 16).with_context(|| format!("chunk length {digits}"))?;
        let start = end + 2;
        if length == 0 {
            return Ok(body);
        }
        match (rest.get(start..start + length), rest.get(start + length + 2..)) {
            (Some(chunk), Some(next)) => {
                body.extend_from_slice(chunk);
                rest = next;
            }
            _ => bail!("the answer ends in mid-chunk"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn bodies_whole_and_in_chunks() {
        let plain = parse(b"HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\nnot yet\n").unwrap();
        assert_eq!((plain.status, plain.body.as_str()), (503, "not yet\n"));
        let chunked = parse(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n",
        )
        .unwrap();
        assert_eq!(chunked.body, "abc0123456789");
        assert!(parse(b"HTTP/1.1 200 OK\r\n").is_err());
    }
}
