//! The live view.

use heatsink::feed::{FleetKey, FleetList, Following};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Paragraph, Row, Table};
use std::io;
use std::sync::Arc;
use std::time::Duration;

const REDRAW: Duration = Duration::from_millis(250);

/// Shows the list until `q`, Esc or Ctrl-C.
pub(crate) fn run(following: &Following) -> io::Result<()> {
    let mut terminal = ratatui::init();
    let out = loop {
        let list = following.list();
        if let Err(e) = terminal.draw(|frame| draw(frame, list.as_ref(), following)) {
            break Err(e);
        }
        match event::poll(REDRAW) {
            Ok(false) => continue,
            Ok(true) => {}
            Err(e) => break Err(e),
        }
        match event::read() {
            Ok(Event::Key(key)) => {
                let interrupt =
                    key.code == KeyCode::Char('c') && key.modifiers == KeyModifiers::CONTROL;
                if interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                    break Ok(());
                }
            }
            Ok(_) => {}
            Err(e) => break Err(e),
        }
    };
    ratatui::restore();
    out
}

fn draw(frame: &mut Frame<'_>, list: Option<&Arc<FleetList>>, following: &Following) {
    let parts = Layout::vertical([Constraint::Length(2), Constraint::Min(1)]);
    let [head, body] = parts.areas(frame.area());
    let title = match list {
        Some(list) => format!("{} hot keys, version {}", list.entries.len(), list.edition),
        None => "no list in force: every process goes by its own detection".into(),
    };
    let delay = following.stats().delay.as_millis();
    frame.render_widget(Paragraph::new(format!("{title}; {delay} ms behind; q ends")), head);
    let rows = list.map(|list| list.entries.iter().map(row).collect::<Vec<_>>());
    let widths = [
        Constraint::Min(24),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(7),
        Constraint::Length(14),
        Constraint::Length(10),
        Constraint::Length(9),
    ];
    let names =
        ["key", "reads/s", "writes/s", "saved/s", "share", "treatment", "processes", "since"];
    let header = Row::new(names).style(Style::new().add_modifier(Modifier::BOLD));
    frame.render_widget(Table::new(rows.unwrap_or_default(), widths).header(header), body);
}

fn row(e: &FleetKey) -> Row<'static> {
    Row::new([
        e.key.to_string(),
        format!("{:.0}", e.reads_per_sec),
        format!("{:.0}", e.writes_per_sec),
        format!("{:.0}", e.saved_per_sec),
        format!("{:.1} %", 100.0 * e.share),
        e.treatment.map_or_else(|| "-".into(), |t| t.to_string()),
        e.reporters.to_string(),
        format!("{} s", e.hot_for.as_secs()),
    ])
}
