//! Runs the user's own `kubectl`, so that every way to log in to a cluster works.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Number of calls of kubectl at a time.
const PARALLEL: usize = 8;

/// Options for the cluster that is asked.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Kubectl {
    /// The kubectl to run
    #[arg(long, value_name = "PATH", default_value = "kubectl")]
    pub(crate) kubectl: PathBuf,
    /// Context of the kubeconfig file
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Kubeconfig file for the cluster
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Time limit of one request of kubectl, such as 30s
    #[arg(long, value_name = "TIME")]
    request_timeout: Option<String>,
    /// Seconds after which a call of kubectl is ended, for example because a pod does not answer
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout: u64,
}

/// Why a call of kubectl failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct KubectlError {
    command: String,
    /// The text that kubectl printed, or why it was ended.
    pub(crate) reason: String,
}

impl std::fmt::Display for KubectlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` failed: {}; {}", self.command, self.reason, self.remedy())
    }
}

impl std::error::Error for KubectlError {}

impl KubectlError {
    fn remedy(&self) -> &'static str {
        let has = |texts: &[&str]| texts.iter().any(|text| self.reason.contains(text));
        match () {
            () if has(&["cannot be started"]) => "install kubectl, or give its path by --kubectl",
            () if has(&["did not end"]) => "look at the pod with `kubectl describe pod`, or raise --timeout",
            () if has(&["Forbidden", "forbidden"]) => "ask the cluster's administrator for this right",
            () if has(&["Unauthorized", "must be logged in"]) => "log in to the cluster again",
            () if has(&["executable file not found", "no such file or directory: unknown"]) => {
                "the image of the container has no command shmesh; use the project's sidecar image"
            }
            () if has(&["onnection", "no such host", "does not exist", "configuration:"]) => {
                "check the cluster with `kubectl cluster-info`, or choose one by --context and --kubeconfig"
            }
            () if has(&["NotFound", "not found"]) => "check the name and --namespace",
            () => "run the command by hand for details",
        }
    }

    /// Whether the API server does not know the kind of the objects.
    pub(crate) fn is_unknown_kind(&self) -> bool {
        self.reason.contains("the server doesn't have a resource type")
    }
}

impl Kubectl {
    /// The arguments of every call, and then `args`.
    fn args(&self, args: &[&str]) -> Vec<String> {
        let mut all = Vec::new();
        let kubeconfig = self.kubeconfig.as_ref().map(|path| path.display().to_string());
        let named = [
            ("--context", &self.context),
            ("--kubeconfig", &kubeconfig),
            ("--request-timeout", &self.request_timeout),
        ];
        for (name, value) in named {
            all.extend(value.iter().map(|value| format!("{name}={value}")));
        }
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        all
    }

    /// The command for a call that shares the terminal of this process.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.args(self.args(args));
        command
    }

    /// Runs kubectl, and returns its standard output.
    ///
    /// # Errors
    /// It cannot be started, fails, or does not end in time.
    pub(crate) fn call(&self, args: &[&str]) -> Result<String, KubectlError> {
        self.call_within(args, Duration::from_secs(self.timeout))
    }

    /// Runs kubectl with a time limit.
    pub(crate) fn call_within(&self, args: &[&str], limit: Duration) -> Result<String, KubectlError> {
        let shown = format!("{} {}", self.kubectl.display(), self.args(args).join(" "));
        let failed = |reason: String| KubectlError { command: shown.clone(), reason };
        let mut command = self.command(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
        let deadline = Instant::now() + limit;
        // The threads are not joined: a process that kubectl has started may keep the pipes open.
        let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => break None,
            }
        };
        let Some(status) = ended else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(format!("it did not end within {} s", limit.as_secs())));
        };
        let rest = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        let text = |bytes: &mpsc::Receiver<Vec<u8>>| {
            String::from_utf8_lossy(&bytes.recv_timeout(rest()).unwrap_or_default()).into_owned()
        };
        if status.success() {
            return Ok(text(&stdout));
        }
        let said = text(&stderr);
        let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        Err(failed(if lines.is_empty() { status.to_string() } else { lines.join("; ") }))
    }

    /// Returns the objects of `kubectl get`.
    ///
    /// # Errors
    /// As [`call`](Self::call), and if the output is not JSON.
    pub(crate) fn get(&self, args: &[&str]) -> Result<Vec<Value>, KubectlError> {
        let args = [&["get"], args, &["--output=json"]].concat();
        let text = self.call(&args)?;
        let parsed: Value = serde_json::from_str(&text).map_err(|error| KubectlError {
            command: format!("{} {}", self.kubectl.display(), args.join(" ")),
            reason: format!("its output is not JSON: {error}"),
        })?;
        match parsed {
            Value::Object(mut list) if list.get("items").is_some_and(Value::is_array) => {
                let Some(Value::Array(items)) = list.remove("items") else { return Ok(Vec::new()) };
                Ok(items)
            }
            one => Ok(vec![one]),
        }
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came before an error is better than nothing.
            let _ = pipe.read_to_end(&mut bytes);
        }
        let _ = sender.send(bytes);
    });
    receiver
}

/// Applies `run` to all items, several at a time, and returns the results in their order.
pub(crate) fn in_parallel<T: Sync, R: Send>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = Mutex::new(items.iter().enumerate());
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..PARALLEL.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let Some((at, item)) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        break;
                    };
                    let result = run(item);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;

    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<u64> = (0..40).collect();
        let doubled = in_parallel(&items, |item| {
            thread::yield_now();
            item * 2
        });
        assert_eq!(doubled, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        assert!(in_parallel(&[] as &[u8], |item| *item).is_empty());
    }

    #[test]
    fn eight_calls_run_at_a_time() {
        let running = (Mutex::new((0_usize, 0_usize)), Condvar::new());
        in_parallel(&[(); 20], |()| {
            let mut counts = running.0.lock().unwrap();
            counts.0 += 1;
            counts.1 = counts.1.max(counts.0);
            assert!(counts.0 <= PARALLEL);
            running.1.notify_all();
            // The first ones wait for each other, and then a moment for one more, which must not come.
            counts = running
                .1
                .wait_timeout_while(counts, shmesh_testing::HANGS, |(_, most)| *most < PARALLEL)
                .unwrap()
                .0;
            let moment = Duration::from_millis(50);
            counts = running.1.wait_timeout_while(counts, moment, |(_, most)| *most <= PARALLEL).unwrap().0;
            counts.0 -= 1;
        });
        assert_eq!(*running.0.lock().unwrap(), (0, PARALLEL));
    }
}
