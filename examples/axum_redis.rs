//! A service over Redis: posts of a type, a like button, a page of health.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1:6379 cargo run --release --features redis,json --example axum_redis
//! curl -X PUT localhost:3000/posts/9 -H 'content-type: application/json' \
//!   -d '{"author":"nova","text":"hello"}'
//! curl localhost:3000/posts/9
//! curl -X POST localhost:3000/posts/9/likes
//! curl localhost:3000/health
//! ```
//! `REDIS_URL` may name several nodes of a cluster, separated by commas. `LISTEN` is where the
//! service listens (127.0.0.1:3000).

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json as Body, Router};
use heatsink::store::RedisStore;
use heatsink::{ErrorKind, Heatsink, Json, Retry};
use serde::{Deserialize, Serialize};
use std::env;
use std::time::Duration;

#[derive(Clone, Serialize, Deserialize)]
struct Post {
    author: String,
    text: String,
}

#[derive(Clone)]
struct Service {
    hs: Heatsink,
    /// For the page of health.
    store: RedisStore,
}

/// What a handler returns when the store fails.
struct Failure(heatsink::Error);

impl From<heatsink::Error> for Failure {
    fn from(e: heatsink::Error) -> Failure {
        Failure(e)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let e = self.0;
        let status = match e.kind() {
            // Nobody knows: the client must not simply send it again.
            _ if e.is_unknown() => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::WrongType | ErrorKind::Overflow => StatusCode::CONFLICT,
            ErrorKind::Limit | ErrorKind::Codec => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        let mut headers = HeaderMap::new();
        if let Retry::After(wait) = e.retry() {
            headers.insert(header::RETRY_AFTER, (wait.as_secs() + 1).into());
        }
        (status, headers, format!("{e}\n")).into_response()
    }
}

async fn read(State(service): State<Service>, Path(id): Path<u64>) -> Result<Response, Failure> {
    let posts = service.hs.typed::<Post, _>(Json);
    Ok(match posts.get(format!("post:{id}")).await? {
        // It derefs to the post, decoded once per load and not once per request.
        Some(post) => Body(Post::clone(&post)).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

async fn write(
    State(service): State<Service>,
    Path(id): Path<u64>,
    Body(post): Body<Post>,
) -> Result<StatusCode, Failure> {
    // Once this returns, no caller of this process sees the old post.
    service.hs.typed::<Post, _>(Json).put(format!("post:{id}"), &post).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn like(State(service): State<Service>, Path(id): Path<u64>) -> Result<String, Failure> {
    // Acknowledged means stored; an error says whether it may have been counted. Likes of one post
    // that come together travel together.
    let likes = service.hs.counter(format!("post:{id}:likes"));
    likes.add(1).await?;
    Ok(format!("{}\n", likes.sum_with(Duration::ZERO).await?.total()))
}

async fn health(State(service): State<Service>) -> String {
    format!("{:#?}\n{:#?}\n", service.hs.stats(), service.store.stats())
}

type Fail = Box<dyn std::error::Error + Send + Sync>;

fn setting(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.into())
}

#[tokio::main]
async fn main() -> Result<(), Fail> {
    let urls = setting("REDIS_URL", "redis://127.0.0.1:6379");
    let urls: Vec<&str> = urls.split(',').collect();
    let store = match urls.as_slice() {
        [one] => RedisStore::connect(one).await?,
        seeds => RedisStore::cluster(seeds).await?,
    };
    let service = Service { hs: Heatsink::new(store.clone())?, store };
    let app = Router::new()
        .route("/posts/{id}", get(read).put(write))
        .route("/posts/{id}/likes", post(like))
        .route("/health", get(health))
        .with_state(service);
    let listener = tokio::net::TcpListener::bind(setting("LISTEN", "127.0.0.1:3000")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}
