//! A connection for calls, which can be closed while calls are pending.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::header::{HeaderValue, USER_AGENT};
use http::uri::Scheme;
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower_service::Service;

/// The version that Kubernetes 1.36.2 uses.
const AGENT: &str = "grpc-go/1.79.3";

/// One HTTP/2 connection. Clones are the same connection.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    requests: SendRequest<Body>,
    authority: http::uri::Authority,
    closed: CancellationToken,
    ended: CancellationToken,
    /// Whether the connection ended without `close`.
    broken: Arc<AtomicBool>,
}

/// Why a request had no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    #[error("grpc: the client connection is closing")]
    Closing,
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

impl Channel {
    pub(super) fn new(
        requests: SendRequest<Body>,
        authority: http::uri::Authority,
        (closed, ended): (CancellationToken, CancellationToken),
        broken: Arc<AtomicBool>,
    ) -> Self {
        Self { requests, authority, closed, ended, broken }
    }

    /// Ends the connection and every call on it, as `ClientConn.Close` does.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    /// Returns when the connection has been closed from this side.
    pub(crate) fn closed(&self) -> impl Future<Output = ()> + Send + 'static {
        self.closed.clone().cancelled_owned()
    }
}

impl Channel {
    /// Returns when the connection has ended from either side.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        self.ended.clone().cancelled_owned()
    }
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Incoming>;
    type Error = ChannelError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ChannelError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), ChannelError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let mut uri = std::mem::take(request.uri_mut()).into_parts();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(self.authority.clone());
        *request.uri_mut() = http::Uri::from_parts(uri).expect("a scheme, an authority and tonic's path");
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
        let mut requests = self.requests.clone();
        let Self { closed, broken, .. } = self.clone();
        Box::pin(async move {
            let response = async {
                requests.ready().await?;
                requests.send_request(request).await
            };
            let mut response = std::pin::pin!(response);
            let closing = || closed.is_cancelled() && !broken.load(Ordering::Acquire);
            tokio::select! {
                biased;
                response = &mut response => {
                    response.map_err(|error| if closing() { ChannelError::Closing } else { error.into() })
                }
                () = closed.cancelled() => {
                    // A caller that lost the connection before it was closed gets an error.
                    if closing() { Err(ChannelError::Closing) } else { Ok(response.await?) }
                }
            }
        })
    }
}
