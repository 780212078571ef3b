//! As much of an HTTP client as the run needs: one request on each connection, bounded in time.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// The longest duration of a request.
const LIMIT: Duration = Duration::from_secs(10);

/// The JSON that `GET path` answers with status 200.
pub(crate) async fn get<T: DeserializeOwned>(address: &str, path: &str) -> Result<T> {
    let answered = timeout(LIMIT, ask(address, path)).await;
    let (status, body) =
        answered.with_context(|| format!("GET http://{address}{path}: no answer in {LIMIT:?}"))??;
    if status != 200 {
        bail!("GET http://{address}{path}: status {status}: {body}");
    }
    Ok(serde_json::from_str(&body)?)
}

async fn ask(address: &str, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer ended early")?;
    let status =
        head.get(9..12).and_then(|status| status.parse().ok()).context("the answer has no status")?;
    Ok((status, body.to_owned()))
}

/// `/search` with this text.
pub(crate) fn search(text: &str) -> String {
    let encoded: String =
        text.bytes()
            .map(|byte| {
                if byte.is_ascii_alphanumeric() {
                    char::from(byte).to_string()
                } else {
                    format!("%{byte:02X}")
                }
            })
            .collect();
    format!("/search?q={encoded}")
}
