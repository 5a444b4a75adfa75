//! A minimal HTTP client: connections that stay open, one request at a time on each, bodies of known length.

use std::cell::RefCell;
use std::io::Write;
use std::io::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct Client {
    address: String,
    idle: RefCell<Vec<Connection>>,
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub fn new(url: &str) -> Client {
        Client {
            address: url.trim_start_matches("http://").to_owned(),
            idle: RefCell::default(),
        }
    }

    /// POST; `headers` are whole lines, each with its line end.
    pub async fn post(&self, path: &str, headers: &str, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let kept = self.idle.borrow_mut().pop();
        let mut connection = match kept {
            Some(connection) => connection,
            None => Connection::open(&self.address).await?,
        };
        let answer = connection.post(&self.address, path, headers, body).await?;
        self.idle.borrow_mut().push(connection);
        Ok(answer)
    }
}

impl Connection {
    async fn open(address: &str) -> Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            stream,
            buffer: Vec::new(),
        })
    }

    async fn post(
        &mut self,
        host: &str,
        path: &str,
        headers: &str,
        body: &[u8],
    ) -> Result<(u16, Vec<u8>)> {
        let Connection { stream, buffer } = self;
        buffer.clear();
        let length = body.len();
        write!(
            buffer,
            "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n{headers}\r\n"
        )?;
        buffer.extend_from_slice(body);
        stream.write_all(buffer).await?;
        buffer.clear();
        let (status, head, length) = loop {
            if stream.read_buf(buffer).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if let Some(end) = buffer.windows(4).position(|part| part == b"\r\n\r\n") {
                let (status, length) = parse(&buffer[..end])?;
                break (status, end + 4, length);
            }
        };
        while buffer.len() < head + length {
            if stream.read_buf(buffer).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok((status, buffer[head..head + length].to_vec()))
    }
}

/// Status and length of the body.
fn parse(head: &[u8]) -> Result<(u16, usize)> {
    let head = std::str::from_utf8(head).map_err(Error::other)?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    let length = lines.find_map(|line| line.strip_prefix("content-length: "));
    match (status.map(str::parse), length.map(str::parse)) {
        (Some(Ok(status)), Some(Ok(length))) => Ok((status, length)),
        _ => Err(Error::other(format!("not understood: {head}"))),
    }
}
