//! Instructions per step of a message, which do not depend on the load of the machine: `cargo bench -p shmesh --bench
//! steps`.
//!
//! The program runs itself under callgrind, which must be installed (package `valgrind`), and reads what each step's
//! function has cost. Each step is a call of its own; `message` has all steps of a message in one function, as an
//! application has them.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a benchmark may panic, and rounds")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;

use shmesh::config::{LinkConfig, PoolId, RingMode};
use shmesh::{Link, LinkOptions, Loan, Message, Side};

/// Number of calls of each step.
const COUNT: u64 = 1024;
/// Number of messages in a batch.
const BATCH: usize = 16;

/// Declares the steps. None is inlined, so callgrind counts each by itself. Two that were equal would become one function,
/// so those have a `black_box`.
macro_rules! steps {
    ($($(#[$attribute:meta])* fn $name:ident $(<$life:lifetime>)? ($($arg:ident: $type:ty),*) $(-> $result:ty)? $body:block)*) => {
        $($(#[$attribute])* #[inline(never)] fn $name $(<$life>)? ($($arg: $type),*) $(-> $result)? $body)*
        const STEPS: &[&str] = &[$(stringify!($name)),*];
    };
}

steps! {
    fn message(tx: &Link, rx: &Link, word: u64) {
        let mut loan = tx.loan().unwrap();
        loan.resize_msg(64).unwrap().as_chunks_mut::<8>().0.fill(word.to_ne_bytes());
        loan.send().map_err(shmesh::Error::from).unwrap();
        let message = rx.receive().unwrap().unwrap();
        let sum = |sum: u64, bytes: &[u8; 8]| sum.wrapping_add(u64::from_ne_bytes(*bytes));
        let words = message.msg().first_chunk::<64>().unwrap().as_chunks::<8>().0;
        assert_eq!(words.iter().fold(0, sum), word.wrapping_mul(8));
    }

    fn message_inline(tx: &Link, rx: &Link, bytes: &[u8]) {
        tx.send_inline(1, 0, bytes).unwrap();
        assert_eq!(rx.receive().unwrap().unwrap().msg().len(), bytes.len());
    }

    fn loan<'a>(tx: &'a Link) -> Loan<'a> {
        tx.loan().unwrap()
    }

    fn resize(loan: &mut Loan<'_>, len: usize) {
        black_box(loan.resize_msg(len).unwrap());
    }

    fn loan_dropped(loan: Loan<'_>) {
        drop(loan);
    }

    fn send(loan: Loan<'_>) {
        loan.send().map_err(shmesh::Error::from).unwrap();
    }

    fn receive<'a>(rx: &'a Link) -> Option<Message<'a>> {
        rx.receive().unwrap()
    }

    fn release(message: Message<'_>) {
        drop(message);
        black_box("release");
    }

    fn receive_nothing(rx: &Link) -> bool {
        rx.receive().unwrap().is_none()
    }

    fn send_inline(tx: &Link, bytes: &[u8]) {
        tx.send_inline(1, 0, bytes).unwrap();
    }

    fn receive_inline<'a>(rx: &'a Link) -> Option<Message<'a>> {
        rx.receive().unwrap()
    }

    fn release_inline(message: Message<'_>) {
        drop(message);
        black_box("inline");
    }

    fn send_batch_of_16<'a>(tx: &'a Link, loans: &mut Vec<Loan<'a>>) {
        assert_eq!(tx.send_batch(loans).unwrap(), BATCH);
    }

    fn receive_batch_of_16<'a>(rx: &'a Link, messages: &mut Vec<Message<'a>>) {
        assert_eq!(rx.receive_batch(messages, BATCH).unwrap(), BATCH);
    }

    fn loan_with_data<'a>(tx: &'a Link) -> Loan<'a> {
        tx.loan_with(PoolId::CpuData).unwrap()
    }

    fn release_with_data(message: Message<'_>) {
        drop(message);
        black_box("data");
    }
}

fn main() {
    let modes = [("spsc", RingMode::Spsc), ("mpmc", RingMode::Mpmc)];
    let counted = std::env::args().skip_while(|arg| arg != "--counted").nth(1);
    if let Some((_, mode)) = counted.and_then(|name| modes.into_iter().find(|(mode, _)| name == *mode)) {
        return run(mode);
    }
    let counts = modes.map(|(mode, _)| count(mode));
    println!("{:24}{:>8}{:>8}", "instructions", "spsc", "mpmc");
    for step in STEPS {
        let [spsc, mpmc] = counts.each_ref().map(|counts| counts.get(*step).copied().unwrap_or(f64::NAN));
        println!("{step:24}{spsc:8.1}{mpmc:8.1}");
    }
}

/// Takes all steps in turns.
fn run(mode: RingMode) {
    let dir = tempfile::tempdir().unwrap();
    let options = LinkOptions::new().dir(dir.path());
    let mut config = LinkConfig::new("steps".parse().unwrap());
    config.ring_mode = mode;
    let rx = options.create(&config).unwrap();
    let tx = options.attach("steps", Side::Secondary).unwrap();
    let bytes = black_box([7; 48]);
    let (mut loans, mut messages) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    for word in 0..COUNT {
        message(&tx, &rx, word);
        message_inline(&tx, &rx, &bytes);
        let mut loaned = loan(&tx);
        resize(&mut loaned, 64);
        send(loaned);
        release(receive(&rx).unwrap());
        loan_dropped(tx.loan().unwrap());
        assert!(receive_nothing(&rx));
        send_inline(&tx, &bytes);
        release_inline(receive_inline(&rx).unwrap());
        loans.extend((0..BATCH).map(|_| tx.loan().unwrap()));
        send_batch_of_16(&tx, &mut loans);
        receive_batch_of_16(&rx, &mut messages);
        messages.clear();
        loan_with_data(&tx).send().map_err(shmesh::Error::from).unwrap();
        release_with_data(rx.receive().unwrap().unwrap());
    }
}

/// Runs all steps under callgrind. Returns the instructions per call of each.
fn count(mode: &str) -> BTreeMap<String, f64> {
    let out = tempfile::NamedTempFile::new().unwrap();
    let status = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--compress-strings=no", "--compress-pos=no"])
        .arg(format!("--callgrind-out-file={}", out.path().display()))
        .arg(std::env::current_exe().unwrap())
        .args(["--counted", mode])
        .status()
        .expect("valgrind is installed");
    assert!(status.success(), "the steps failed under callgrind");
    let text = std::fs::read_to_string(out.path()).unwrap();
    let mut lines = text.lines();
    let mut counts: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    // A call is three lines: the function called, `calls=` with their number, and the line that calls with their cost.
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("cfn=") else { continue };
        let Some(step) = STEPS.iter().find(|step| name.strip_prefix("steps::") == Some(**step)) else {
            continue;
        };
        let number = |line: Option<&str>, nth| {
            line.unwrap().split([' ', '=']).nth(nth).unwrap().parse::<f64>().unwrap()
        };
        let (calls, instructions) = counts.entry((*step).to_owned()).or_default();
        *calls += number(lines.next(), 1);
        *instructions += number(lines.next(), 1);
    }
    counts.into_iter().map(|(step, (calls, instructions))| (step, instructions / calls)).collect()
}
