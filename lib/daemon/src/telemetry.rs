//! Structured logs on standard error, with a filter that can be changed at run time.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use crate::args::LogFormat;

/// Handle to change the log filter.
#[derive(Clone, Debug)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Sets the log filter.
    ///
    /// # Errors
    /// The filter is invalid; the previous one stays in use.
    pub fn set(&self, filter: &str) -> Result<()> {
        self.0.reload(parse(filter)?).context("cannot change the log filter")
    }
}

fn parse(filter: &str) -> Result<EnvFilter> {
    EnvFilter::builder().parse(filter).with_context(|| {
        format!("{filter:?} is not a valid log filter; try `info` or `info,shmesh_sidecar=debug`")
    })
}

/// Initializes logging, once per process.
///
/// # Errors
/// The filter is invalid, or logging is already initialized.
pub fn init(filter: &str, format: LogFormat) -> Result<LogFilter> {
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Json => {
            registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).try_init()
        }
        LogFormat::Text => {
            // No colour codes in files.
            let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
            registry.with(layer).try_init()
        }
    }
    .context("cannot start logging")?;
    Ok(LogFilter(handle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_can_be_changed_and_an_invalid_one_leaves_the_previous() {
        let filter = init("info", LogFormat::Text).unwrap();
        filter.set("shmesh=debug").unwrap();
        assert!(filter.set("no[such=filter").is_err());
        assert_eq!(filter.0.with_current(ToString::to_string).unwrap(), "shmesh=debug");
    }
}
