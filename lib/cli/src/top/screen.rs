//! The interactive screen of `shmesh top`.

use std::time::Instant;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Table, TableState};
use ratatui::{DefaultTerminal, Frame};
use shmesh::config::LinkName;
use shmesh_sys::top::{COLUMNS, PoolUse, fullest};

use super::Args;
use super::sample::{LinkSample, LinkState, Rates, Sample, Sampler};
use crate::{human, people};

/// The order of the links.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LinkOrder {
    Name,
    Rate,
    Queued,
    Pool,
}

impl LinkOrder {
    fn next(self) -> Self {
        match self {
            Self::Name => Self::Rate,
            Self::Rate => Self::Queued,
            Self::Queued => Self::Pool,
            Self::Pool => Self::Name,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Rate => "messages per second",
            Self::Queued => "queued messages",
            Self::Pool => "fullest pool",
        }
    }

    /// Sorts links by name, or the largest first.
    fn sort(self, links: &mut [(&LinkSample, Rates)]) {
        let size = |(link, rates): &(&LinkSample, Rates)| {
            let state = link.seen.as_ref().ok();
            match self {
                Self::Name => 0.0,
                Self::Rate => rates.messages.iter().flatten().sum(),
                Self::Queued => {
                    as_f64(state.map_or(0, |state| state.rings.iter().map(|ring| ring.queued).sum()))
                }
                Self::Pool => {
                    as_f64(state.and_then(|state| fullest(&state.pools)).map_or(0, PoolUse::percent))
                }
            }
        };
        // The sort is stable, and the directory lists links by name.
        links.sort_by(|a, b| size(b).total_cmp(&size(a)));
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers that are compared")]
fn as_f64(number: usize) -> f64 {
    number as f64
}

/// The contents of the screen, and the choices of the user.
#[derive(Debug)]
struct Screen {
    order: LinkOrder,
    /// The link whose participants are shown; the first one if it is gone.
    selected: Option<LinkName>,
    now: Sample,
    before: Option<Sample>,
    /// Whether colours are used: not if the environment has `NO_COLOR`.
    colours: bool,
}

/// Shows the screen until the user ends it.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut sampler = args.sampler();
    let mut screen = Screen {
        order: LinkOrder::Name,
        selected: args.links.first().cloned(),
        now: args.sample(&mut sampler)?,
        before: None,
        colours: !no_colour,
    };
    // Also restores the terminal when a thread panics.
    let mut terminal = ratatui::try_init()?;
    let done = screen.refresh(args, &mut sampler, &mut terminal);
    ratatui::try_restore()?;
    done
}

impl Screen {
    fn refresh(
        &mut self,
        args: &Args,
        sampler: &mut Sampler,
        terminal: &mut DefaultTerminal,
    ) -> anyhow::Result<()> {
        for intervals in 1.. {
            let due = Instant::now() + args.interval();
            loop {
                terminal.draw(|frame| self.draw(frame))?;
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() || !event::poll(left)? {
                    break;
                }
                if let Event::Key(key) = event::read()?
                    && self.press(key)
                {
                    return Ok(());
                }
            }
            self.before = Some(std::mem::replace(&mut self.now, args.sample(sampler)?));
            if args.is_enough(intervals) {
                break;
            }
        }
        Ok(())
    }

    /// Applies a key. Returns whether it ends the program.
    fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            _ => {}
        }
        false
    }

    fn sorted(&self) -> Vec<(&LinkSample, Rates)> {
        let rates = |link| (link, self.now.rates(link, self.before.as_ref()));
        let mut links: Vec<_> = self.now.links.iter().map(rates).collect();
        self.order.sort(&mut links);
        links
    }

    fn position(&self, links: &[(&LinkSample, Rates)]) -> usize {
        links.iter().position(|(link, _)| Some(&link.name) == self.selected.as_ref()).unwrap_or(0)
    }

    fn move_by(&mut self, by: isize) {
        let links = self.sorted();
        let next = self.position(&links).saturating_add_signed(by).min(links.len().saturating_sub(1));
        self.selected = links.get(next).map(|(link, _)| link.name.clone());
    }

    fn style(&self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let links = self.sorted();
        let selected = self.position(&links);
        let [top, middle, bottom, keys] = Layout::vertical([
            Constraint::Percentage(50),
            Constraint::Fill(1),
            Constraint::Length(links.get(selected).map_or(0, |(link, _)| pool_lines(link))),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_links(frame, top, &links, selected);
        if let Some((link, rates)) = links.get(selected) {
            match &link.seen {
                Ok(state) => {
                    self.draw_participants(frame, middle, &link.name, state, rates);
                    self.draw_pools(frame, bottom, state);
                }
                Err(error) => frame.render_widget(
                    Paragraph::new(error.as_str()).block(Block::new().borders(Borders::TOP)),
                    middle,
                ),
            }
        }
        frame.render_widget(
            Line::from(format!(" up/down: select   s: order ({})   q: end", self.order.name()))
                .style(Modifier::DIM),
            keys,
        );
    }

    fn draw_links(&self, frame: &mut Frame<'_>, area: Rect, links: &[(&LinkSample, Rates)], selected: usize) {
        let rows: Vec<[String; COLUMNS.len()]> =
            links.iter().map(|(link, rates)| link.row(rates).cells()).collect();
        let rows_drawn = rows.iter().zip(links).map(|(row, (link, _))| {
            let is_dead =
                |state: &LinkState| state.participants.iter().any(|one| !people::may_live(&one.seat));
            let style = match &link.seen {
                Err(_) => self.style(Color::Red),
                Ok(state) if is_dead(state) => self.style(Color::Red),
                Ok(state) if fullest(&state.pools).is_some_and(|pool| pool.percent() >= 90) => {
                    self.style(Color::Yellow)
                }
                Ok(_) => Style::new(),
            };
            Row::new(row.iter().zip(COLUMNS).map(|(text, head)| cell(text, head))).style(style)
        });
        let width = |column: usize| {
            let head = COLUMNS[column].trim_start_matches('>').len();
            rows.iter().map(|row| row[column].chars().count()).chain([head]).max().unwrap_or(head)
        };
        let widths = (0..COLUMNS.len())
            .map(|column| Constraint::Length(u16::try_from(width(column)).unwrap_or(u16::MAX)));
        let head =
            Row::new(COLUMNS.map(|head| cell(head.trim_start_matches('>'), head))).style(Modifier::BOLD);
        let table = Table::new(rows_drawn, widths)
            .header(head)
            .column_spacing(2)
            .row_highlight_style(Modifier::REVERSED);
        let mut state = TableState::new().with_selected(Some(selected));
        frame.render_stateful_widget(table, area, &mut state);
        if links.is_empty() {
            frame.render_widget("\nno links", area);
        }
    }

    fn draw_participants(
        &self,
        frame: &mut Frame<'_>,
        area: Rect,
        name: &LinkName,
        state: &LinkState,
        rates: &Rates,
    ) {
        let rows = state.participants.iter().map(|participant| {
            let seat = &participant.seat;
            let word = seat.participant.word;
            let asleep = if seat.asleep { ", asleep" } else { "" };
            let cells = [
                seat.participant.seat.to_string(),
                word.side().to_string(),
                word.pid().to_string(),
                participant.loaned.to_string(),
                participant.borrowed.to_string(),
                format!("{}{asleep}{}", people::state(seat), people::place(seat)),
            ];
            let style = if people::may_live(seat) { Style::new() } else { self.style(Color::Red) };
            Row::new(cells).style(style)
        });
        let widths = [4, 9, 8, 6, 8].map(Constraint::Length).into_iter().chain([Constraint::Fill(1)]);
        let pending = state.pending.map_or(String::new(), |pending| {
            format!(", {} pending", human::plural(pending as u64, "request"))
        });
        let held = rates.hold.map_or(String::new(), |times| {
            let [p50, p99] = times.map(|time| human::nanos(time * 1e9));
            format!(", messages held {p50}, 99 % of them up to {p99}")
        });
        let table = Table::new(rows, widths)
            .header(Row::new(["seat", "side", "pid", "loaned", "borrowed", "state"]).style(Modifier::BOLD))
            .column_spacing(2)
            .block(Block::new().borders(Borders::TOP).title(format!(" {name}{pending}{held} ")));
        frame.render_widget(table, area);
    }

    fn draw_pools(&self, frame: &mut Frame<'_>, area: Rect, state: &LinkState) {
        let line = |pool: &PoolUse| {
            let bar = "#".repeat(pool.percent().min(100) * 20 / 100);
            let style = if pool.percent() >= 90 { self.style(Color::Yellow) } else { Style::new() };
            Line::from(format!("{:10} [{bar:20}] {} of {} buffers used", pool.name, pool.used, pool.len))
                .style(style)
        };
        frame.render_widget(Paragraph::new(state.pools.iter().map(line).collect::<Vec<_>>()), area);
    }
}

/// The height of the list of pools.
fn pool_lines(link: &LinkSample) -> u16 {
    let pools = link.seen.as_ref().map_or(0, |state| state.pools.len());
    u16::try_from(pools).unwrap_or(u16::MAX)
}

/// A cell of the table of links, aligned as its heading says.
fn cell<'a>(text: &'a str, head: &str) -> Cell<'a> {
    let line = Line::from(text);
    Cell::from(if head.starts_with('>') { line.right_aligned() } else { line })
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use shmesh::config::LinkConfig;
    use shmesh::{LinkOptions, Side};

    use super::*;

    fn screen(dir: &std::path::Path) -> Screen {
        let now = Sampler::new(dir, &[]).sample().unwrap();
        Screen { order: LinkOrder::Name, selected: None, now, before: None, colours: true }
    }

    fn drawn(screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(120, 24)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> bool {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn selected_link_is_shown_with_its_participants_and_pools() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let create = |name: &str| options.create(&LinkConfig::new(name.parse().unwrap())).unwrap();
        let (_blue, red) = (create("blue"), create("red"));
        let reader = options.attach("red", Side::Secondary).unwrap();
        let _loan = red.loan().unwrap();
        red.loan().unwrap().send().unwrap();
        let _message = reader.receive().unwrap();

        let mut screen = screen(dir.path());
        assert!(drawn(&screen).contains(" blue ─"), "{}", drawn(&screen));
        press(&mut screen, KeyCode::Down);
        press(&mut screen, KeyCode::Down);
        let text = drawn(&screen);
        assert!(text.contains(" red ─"), "{text}");
        assert!(text.contains("cpu_msg    [                    ] 2 of 1024 buffers used"), "{text}");
        let pid = std::process::id();
        let has = |side: &str, loaned: u32, borrowed: u32| {
            let wanted = [side, &pid.to_string(), &loaned.to_string(), &borrowed.to_string(), "alive"];
            text.lines().any(|line| line.trim_matches('"').split_whitespace().skip(1).eq(wanted))
        };
        assert!(has("primary", 1, 0), "{text}");
        assert!(has("secondary", 0, 1), "{text}");

        press(&mut screen, KeyCode::Up);
        assert!(drawn(&screen).contains(" blue ─"));
    }

    #[test]
    fn links_are_ordered_by_queued_messages() {
        let dir = tempfile::tempdir().unwrap();
        let options = LinkOptions::new().dir(dir.path());
        let create = |name: &str| options.create(&LinkConfig::new(name.parse().unwrap())).unwrap();
        let (_blue, red) = (create("blue"), create("red"));
        red.send_inline(1, 0, b"").unwrap();
        let mut screen = screen(dir.path());
        let names = |screen: &Screen| {
            screen.sorted().iter().map(|(link, _)| link.name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(&screen), ["blue", "red"]);
        while screen.order != LinkOrder::Queued {
            press(&mut screen, KeyCode::Char('s'));
        }
        assert_eq!(names(&screen), ["red", "blue"]);
    }

    #[test]
    fn keys_that_end_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let mut screen = screen(dir.path());
        assert!(drawn(&screen).contains("no links"));
        assert!(!press(&mut screen, KeyCode::Down));
        assert!(press(&mut screen, KeyCode::Char('q')));
        assert!(screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!press(&mut screen, KeyCode::Char('c')));
    }
}
