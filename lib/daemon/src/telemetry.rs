//! Logs: structured, on standard error, with a filter that can be changed while the daemon runs.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use crate::args::LogFormat;

/// Changes what is logged.
///
/// ```
/// use shmesh_daemon::{args::LogFormat, telemetry};
/// let filter = telemetry::init("info", LogFormat::Text)?;
/// filter.set("debug")?;
/// assert!(filter.set("no[such=filter").is_err(), "and what was there stays");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Changes the filter.
    ///
    /// # Errors
    /// `filter` is none.
    ///
    /// ```
    /// use shmesh_daemon::{args::LogFormat, telemetry};
    /// telemetry::init("info", LogFormat::Json)?.set("warn,shmesh=trace")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set(&self, filter: &str) -> Result<()> {
        self.0.reload(parse(filter)?).context("cannot change the log filter")
    }
}

fn parse(filter: &str) -> Result<EnvFilter> {
    EnvFilter::builder()
        .parse(filter)
        .with_context(|| format!("{filter:?} is no log filter; try `info` or `info,shmesh_sidecar=debug`"))
}

/// Starts logging. Once per process.
///
/// # Errors
/// `filter` is none, or logging has been started before.
///
/// ```
/// use shmesh_daemon::{args::LogFormat, telemetry};
/// telemetry::init("info", LogFormat::Text)?;
/// assert!(telemetry::init("info", LogFormat::Text).is_err(), "a second time");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn init(filter: &str, format: LogFormat) -> Result<LogFilter> {
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Json => {
            registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).try_init()
        }
        LogFormat::Text => {
            // Colours are for a terminal: in a file they are noise.
            let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
            registry.with(layer).try_init()
        }
    }
    .context("cannot start logging")?;
    Ok(LogFilter(handle))
}
