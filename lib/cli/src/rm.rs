//! `shmesh rm`: removes links, and marked files of other programs, that no process uses.

use std::io::Write;

use anyhow::{Context, bail};
use shmesh::config::LinkName;
use shmesh::inspect::{FileRemoval, Remains, memory_files, names, remove_stale};
use shmesh_sys::causes::with_causes;

use crate::args::Dir;
use crate::{human, nvipc, people};

const EXAMPLES: &str = "\
Removes the segments, the socket and the lock of a link, after checking by their content that they belong to shmesh. A link
removes itself when its last participant detaches; this command is for links left behind by a crash.

The command refuses to remove a link with living participants, and lists them. A process in another pid namespace counts as
living. With --force the files are removed, but attached processes keep the memory and continue.

With --stale it also removes shared memory, semaphores and System V segments of programs with libshmesh_posix.so that have ended. Other
files are never removed, because it is unknown whether they are in use.

Examples:
  shmesh rm fronthaul
  shmesh rm fronthaul --force      even if it is in use
  shmesh rm --stale                all links without living participants and queued messages
  shmesh rm --stale --force        also links with queued messages, which are lost

The exit status is 1 if any removal was refused.";

/// The options of `shmesh rm`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of the links
    #[arg(value_name = "LINK", conflicts_with = "stale")]
    links: Vec<LinkName>,
    /// Remove all links without living participants, and all marked files that no process uses
    #[arg(long)]
    stale: bool,
    /// Remove links with living participants; with --stale, links with queued messages
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    dir: Dir,
}

/// Removes the links that the command line names.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.stale {
        return stale(args, out);
    }
    if args.links.is_empty() {
        let what = "name the links to remove, or give --stale to remove all that no process uses";
        return Err(crate::Refusal::Request(what.to_owned()).into());
    }
    named(args, out)
}

fn named(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut refused = Vec::new();
    for name in &args.links {
        if let Err(error) = one(args, name, out) {
            refused.push(error);
        }
    }
    match refused.len() {
        0 => Ok(()),
        1 => Err(refused.remove(0)),
        _ => {
            for error in &refused {
                eprintln!("error: {error:#}");
            }
            bail!("{} of {} links were not removed", refused.len(), args.links.len())
        }
    }
}

fn one(args: &Args, name: &LinkName, out: &mut dyn Write) -> anyhow::Result<()> {
    let remains = Remains::of(&args.dir.dir, name)?;
    if let Some(theirs) = nvipc::seen(&args.dir.dir, name) {
        bail!(
            "{}: end its processes first, then remove {name}_* and sem.{name}_dbg_sem in {}",
            nvipc::not_here(name, &theirs),
            args.dir.dir.display()
        );
    }
    if let Some(foreign) = remains.foreign.first() {
        bail!("link {name}: {} is not a file of a shmesh link; move it away", foreign.display());
    }
    if let Some(user) = user(&remains).filter(|_| !args.force) {
        bail!("link {name}: {user} uses it; stop that process first, or remove the link anyway with --force");
    }
    let queued = remains.queued.unwrap_or(0) as u64;
    let bytes = remains.remove()?;
    let lost = if queued > 0 {
        format!(", with {}", human::plural(queued, "queued message"))
    } else {
        String::new()
    };
    Ok(writeln!(out, "removed {name} ({}{lost})", human::bytes(bytes))?)
}

/// The living participants of a link, in words.
fn user(remains: &Remains) -> Option<String> {
    let living = remains.seats.iter().filter(|seat| people::may_live(seat));
    let mut living: Vec<String> = living
        .map(|seat| {
            let word = seat.participant.word;
            let elsewhere = if people::state(seat) == "unknown" { ", of another pid namespace" } else { "" };
            format!("process {} ({}{elsewhere})", word.pid(), word.side())
        })
        .collect();
    living.dedup();
    if living.is_empty() && remains.is_held {
        living.push("a process that holds its lock".to_owned());
    }
    (!living.is_empty()).then(|| living.join(" and "))
}

fn stale(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let dir = &args.dir.dir;
    let names = names(dir).with_context(|| format!("cannot read the IPC directory {}", dir.display()))?;
    let (mut removed, mut unreadable, mut not_removed) = (0_u64, 0_u64, 0_u64);
    for name in names {
        let remains = match Remains::of(dir, &name) {
            Ok(remains) => remains,
            Err(error) => {
                eprintln!("error: {}", with_causes(&error));
                unreadable += 1;
                continue;
            }
        };
        let kept = if let Some(foreign) = remains.foreign.first() {
            Some(format!("{} is not a file of a shmesh link", foreign.display()))
        } else if let Some(user) = user(&remains) {
            Some(format!("{user} uses it"))
        } else {
            // A link that cannot be read may hold messages.
            let waiting = match (&remains.damage, remains.queued) {
                (Some(damage), _)
                    if remains.files.iter().any(|(path, _)| path.to_string_lossy().ends_with("_shm")) =>
                {
                    Some(with_causes(damage))
                }
                (_, Some(queued)) if queued > 0 => Some(human::plural(queued as u64, "queued message")),
                _ => None,
            };
            waiting.filter(|_| !args.force).map(|what| format!("{what}; --force removes it anyway"))
        };
        match kept {
            Some(why) => writeln!(out, "kept    {name}: {why}")?,
            // In a directory of several users, a link of another user must not prevent the removal of others.
            None => match remains.remove() {
                Ok(bytes) => {
                    writeln!(out, "removed {name} ({})", human::bytes(bytes))?;
                    removed += 1;
                }
                Err(error) => {
                    eprintln!("error: {}", with_causes(&error));
                    not_removed += 1;
                }
            },
        }
    }
    writeln!(out, "{} removed", human::plural(removed, "link"))?;
    let failed: Vec<String> = [(unreadable, "read"), (not_removed, "removed")]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{} could not be {what}", human::plural(count, "link")))
        .collect();
    let failed_files = stale_files(args, out)?;
    let failed: Vec<String> = failed.into_iter().chain(failed_files).collect();
    if failed.is_empty() { Ok(()) } else { bail!(failed.join(", ")) }
}

/// Removes the files of programs that have ended; says how many could not be removed.
fn stale_files(args: &Args, out: &mut dyn Write) -> anyhow::Result<Option<String>> {
    let dir = &args.dir.dir;
    let files =
        memory_files(dir).with_context(|| format!("cannot read the IPC directory {}", dir.display()))?;
    let (mut removed, mut freed, mut not_removed) = (0_u64, 0_u64, 0_u64);
    for file in files.iter().filter(|file| file.is_marked) {
        let name = file.name.to_string_lossy();
        match remove_stale(dir, &file.name) {
            Ok(FileRemoval::Removed(bytes)) => {
                writeln!(out, "removed {name} ({})", human::bytes(bytes))?;
                removed += 1;
                freed += bytes;
            }
            Ok(FileRemoval::InUse) => writeln!(out, "kept    {name}: a process uses it")?,
            Ok(_) => {}
            // In a directory of several users, a file of another user is no reason to leave the rest.
            Err(error) => {
                eprintln!("error: cannot remove {name}: {error}");
                not_removed += 1;
            }
        }
    }
    if removed > 0 {
        writeln!(out, "{} removed ({})", human::plural(removed, "file"), human::bytes(freed))?;
    }
    Ok((not_removed > 0).then(|| format!("{} could not be removed", human::plural(not_removed, "file"))))
}
