//! A tower layer that turns a refusal into `429 Too Many Requests` with `Retry-After`.
//!
//! The layer is 40 lines and yours to copy: heatsink depends on no web framework. The program
//! serves a page by heatsink behind the layer, asks for it more often than its budget allows, and
//! checks what comes back.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use heatsink::{Admission, Budget, Error, ErrorKind, Heatsink, Retry, store::MemoryStore};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Answers errors of heatsink in the place of the service inside.
#[derive(Clone, Copy, Debug)]
struct ShedLayer;

impl<S> Layer<S> for ShedLayer {
    type Service = Shed<S>;
    fn layer(&self, inner: S) -> Shed<S> {
        Shed { inner }
    }
}

#[derive(Clone, Debug)]
struct Shed<S> {
    inner: S,
}

impl<S, R> Service<R> for Shed<S>
where
    S: Service<R, Response = Response, Error = Error>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // An error here comes again from the call, where it can be answered.
        self.inner.poll_ready(cx).map(|_| Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        let answer = self.inner.call(request);
        Box::pin(async move { Ok(answer.await.unwrap_or_else(|error| refusal(&error))) })
    }
}

fn refusal(error: &Error) -> Response {
    let status = match error.kind() {
        ErrorKind::Shed => StatusCode::TOO_MANY_REQUESTS,
        // Nobody knows whether it was applied: the client must not simply send it again.
        _ if error.is_unknown() => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut response = (status, error.to_string()).into_response();
    if let Retry::After(wait) = error.retry() {
        // Whole seconds, rounded up: who comes back on time is served.
        let secs = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(secs));
    }
    response
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    if std::env::args().any(|arg| arg == "--help") {
        println!("usage: tower_shed    asks for one page 20 times, with a budget of 5 loads");
        return Ok(ExitCode::SUCCESS);
    }
    let admission = Admission::new().per_key(Budget::per_sec(1).burst(5));
    let hs = Heatsink::builder(MemoryStore::new(8)).admission(admission).build()?;
    let page = service_fn(move |request: Request| {
        let hs = hs.clone();
        async move {
            // A page that must not come from the near cache, so that every one costs a load.
            let read = heatsink::Read::latest();
            let page = hs.get_with(request.uri().path(), read).await?;
            let page = page.map_or_else(|| Body::from("none yet"), |page| page.to_bytes().into());
            Ok::<_, Error>(page.into_response())
        }
    });
    let app: Router = Router::new().route_service("/{page}", ShedLayer.layer(page));
    let (mut served, mut refused) = (0, 0);
    for _ in 0..20 {
        let request = Request::get("/front").body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        let after = response.headers().get(header::RETRY_AFTER).cloned();
        match response.status() {
            StatusCode::OK => served += 1,
            StatusCode::TOO_MANY_REQUESTS if after == Some(HeaderValue::from(1)) => refused += 1,
            other => return Err(format!("unexpected answer: {other}, {after:?}").into()),
        }
    }
    println!("{served} served, {refused} answered 429 with Retry-After: 1");
    Ok(if (served, refused) == (5, 15) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
