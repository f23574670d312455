//! A proxy between the store and a server that harms the replies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What the proxy does with the replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Harm {
    None,
    /// Nothing comes back any more.
    Swallow,
    /// The reply is dropped and both ends are closed.
    Close,
    /// Half of the reply is sent, then both ends are closed.
    Half,
}

pub struct Proxy {
    pub port: u16,
    harm: Arc<AtomicU8>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// A proxy to the server at `to`.
    pub async fn start(to: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let harm = Arc::new(AtomicU8::new(Harm::None as u8));
        let of = harm.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await {
                    tokio::spawn(carry(client, server, of.clone()));
                }
            }
        });
        Proxy { port, harm, task }
    }

    pub fn set(&self, harm: Harm) {
        self.harm.store(harm as u8, Ordering::SeqCst);
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, server: TcpStream, harm: Arc<AtomicU8>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = tokio::spawn(async move {
        drop(tokio::io::copy(&mut from_client, &mut to_server).await);
    });
    let mut reply = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from_server.read(&mut reply).await {
        let harm = harm.load(Ordering::SeqCst);
        if harm == Harm::Swallow as u8 {
            continue;
        }
        if harm == Harm::Close as u8 {
            break;
        }
        let cut = if harm == Harm::Half as u8 { n.div_ceil(2) } else { n };
        if to_client.write_all(&reply[..cut]).await.is_err() || cut < n {
            break;
        }
    }
    requests.abort();
}
