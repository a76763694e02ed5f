//! One connection to one etcd endpoint at a time, and the move to the next one when it fails.
//!
//! The client library balances over all endpoints and cannot be told to leave one that swallows
//! packets. Here each call has a deadline, a failing endpoint is left at once, and the endpoint
//! that worked last is tried first.

use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, Error, KvClient, WatchClient};
use tokio::{
    sync::{Notify, futures::Notified},
    time::{Instant, timeout_at},
};

use super::{
    endpoint::{Endpoint, Password, TlsFiles},
    failure::{Cause, Failure},
};
use crate::telemetry::metrics::Metrics;

/// How long a TCP connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one call may take on one endpoint, connecting and authenticating included.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// The largest answer we accept: some 100 000 leases, far above what one page or event holds.
const MAX_ANSWER: usize = 64 << 20;

/// The failover layer over the client library.
pub(super) struct EtcdClient {
    endpoints: Vec<Endpoint>,
    tls: TlsFiles,
    user: Option<(String, Password)>,
    /// The open connection and the index of its endpoint.
    open: RefCell<Option<(usize, Client)>>,
    /// The endpoint to try first: the one that answered last.
    preferred: Cell<usize>,
    renewed: Notify,
    metrics: Metrics,
}

/// A client bound to one endpoint, for what has to stay on one connection.
pub(super) struct Bound {
    pub client: Client,
    pub endpoint: Endpoint,
}

/// For watches: an event batch may exceed the library's 4 MiB.
pub(super) fn watcher(client: &Client) -> WatchClient {
    client.watch_client().max_decoding_message_size(MAX_ANSWER)
}

/// For reads: a list of leases may exceed the library's 4 MiB.
pub(super) fn kv(client: &Client) -> KvClient {
    client.kv_client().max_decoding_message_size(MAX_ANSWER)
}

impl EtcdClient {
    pub(super) fn new(
        endpoints: Vec<Endpoint>,
        tls: TlsFiles,
        user: Option<(String, Password)>,
        metrics: Metrics,
    ) -> Self {
        Self {
            endpoints,
            tls,
            user,
            open: RefCell::default(),
            preferred: Cell::new(0),
            renewed: Notify::new(),
            metrics,
        }
    }

    /// Whether calls are made in the name of a user.
    pub(super) fn has_user(&self) -> bool {
        self.user.is_some()
    }

    /// Whether there is an endpoint to go to from another.
    pub(super) fn has_several_endpoints(&self) -> bool {
        self.endpoints.len() > 1
    }

    /// All endpoints in one line.
    pub(super) fn endpoints(&self) -> String {
        self.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Runs `rpc`, on another endpoint if the first cannot serve it. A write may thus be sent
    /// twice if its answer got lost, so writes have to be guarded by a comparison.
    pub(super) async fn call<T>(
        &self,
        rpc: impl AsyncFnMut(&mut Client) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        self.call_bound(rpc).await.map(|(answer, _)| answer)
    }

    /// As [`call`](Self::call), and returns the connection on which it worked.
    pub(super) async fn call_bound<T>(
        &self,
        mut rpc: impl AsyncFnMut(&mut Client) -> Result<T, Error>,
    ) -> Result<(T, Bound), Failure> {
        let first = self.preferred.get();
        let mut failures = Vec::new();
        for offset in 0..self.endpoints.len() {
            let index = (first + offset) % self.endpoints.len();
            let reused = self.open.borrow().as_ref().is_some_and(|(open, _)| *open == index);
            let started = Instant::now();
            let mut result = Box::pin(self.call_one(index, &mut rpc)).await;
            // A connection that was idle may be long dead (etcd restarted): try a fresh one.
            if reused && leaves(&result) && started.elapsed() < CALL_TIMEOUT / 2 {
                result = Box::pin(self.call_one(index, &mut rpc)).await;
            }
            match result {
                Ok((answer, client)) => {
                    self.preferred.set(index);
                    self.metrics.store_connected.set(1);
                    return Ok((answer, Bound { client, endpoint: self.endpoints[index].clone() }));
                }
                Err(failure) if failure.cause == Cause::Endpoint => failures.push(failure.text),
                Err(failure) => {
                    self.preferred.set(index);
                    return Err(failure);
                }
            }
        }
        self.metrics.store_connected.set(0);
        Err(Failure::new(Cause::Endpoint, failures.join("; ")))
    }

    /// Gives all connections up, because our own address changed: what is sent from the old one
    /// gets no answer, which would otherwise be found out by waiting.
    pub(super) fn renew(&self) {
        *self.open.borrow_mut() = None;
        self.renewed.notify_waiters();
    }

    /// Resolves when [`renew`](Self::renew) is called after this.
    pub(super) fn renewed(&self) -> Notified<'_> {
        self.renewed.notified()
    }

    /// Drops the connection to an endpoint that turned out to be useless and prefers the next.
    pub(super) fn leave(&self, endpoint: &Endpoint) {
        if let Some(index) = self.endpoints.iter().position(|e| e == endpoint) {
            self.forget(index);
            if self.preferred.get() == index {
                self.preferred.set((index + 1) % self.endpoints.len());
            }
        }
    }

    async fn call_one<T>(
        &self,
        index: usize,
        rpc: &mut impl AsyncFnMut(&mut Client) -> Result<T, Error>,
    ) -> Result<(T, Client), Failure> {
        let endpoint = &self.endpoints[index];
        let deadline = Instant::now() + CALL_TIMEOUT;
        let result = timeout_at(deadline, async {
            let mut client = self.connection(index).await?;
            let mut result = rpc(&mut client).await;
            if let Err(error) = &result
                && self.has_user()
                && self.explain(endpoint, error).cause == Cause::Token
            {
                self.authenticate(endpoint, &mut client).await?;
                result = rpc(&mut client).await;
            }
            result.map(|answer| (answer, client)).map_err(|error| self.explain(endpoint, &error))
        })
        .await
        .unwrap_or_else(|_| Err(Failure::silent(endpoint, CALL_TIMEOUT.as_secs())));
        if leaves(&result) {
            self.forget(index);
        }
        result
    }

    /// The open connection to this endpoint, or a new one.
    async fn connection(&self, index: usize) -> Result<Client, Failure> {
        if let Some((open, client)) = &*self.open.borrow()
            && *open == index
        {
            return Ok(client.clone());
        }
        let endpoint = &self.endpoints[index];
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            // Members without a leader then say so instead of serving stale data or nothing.
            .with_require_leader(true);
        if endpoint.tls {
            let tls = self.tls.load().map_err(|text| Failure::new(Cause::Endpoint, text))?;
            options = options.with_tls(tls);
        }
        let mut client = Client::connect([&endpoint.url], Some(options))
            .await
            .map_err(|error| self.explain(endpoint, &error))?;
        self.authenticate(endpoint, &mut client).await?;
        *self.open.borrow_mut() = Some((index, client.clone()));
        Ok(client)
    }

    /// Gets a token for the user, if there is one. All clones of the client use it.
    async fn authenticate(&self, endpoint: &Endpoint, client: &mut Client) -> Result<(), Failure> {
        let Some((name, password)) = &self.user else { return Ok(()) };
        let result = client.update_user(Some((name.clone(), password.reveal().to_owned()))).await;
        match result.map_err(|error| self.explain(endpoint, &error)) {
            Err(failure) if failure.cause != Cause::AuthDisabled => Err(failure),
            _ => Ok(()),
        }
    }

    fn forget(&self, index: usize) {
        let mut open = self.open.borrow_mut();
        if open.as_ref().is_some_and(|(i, _)| *i == index) {
            *open = None;
        }
    }

    fn explain(&self, endpoint: &Endpoint, error: &Error) -> Failure {
        Failure::explain(endpoint, self.has_user(), error)
    }
}

/// Whether the endpoint is to be left because of this result.
fn leaves<T>(result: &Result<T, Failure>) -> bool {
    matches!(result, Err(Failure { cause: Cause::Endpoint, .. }))
}
