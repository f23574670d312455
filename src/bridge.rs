//! The bridges to the facades of `metrics` and `tracing`. Neither installs anything; without their
//! features they are empty. No label carries a key.

use crate::engine::control::steering::Event;
#[cfg(feature = "metrics")]
use crate::stats::Stats;

/// Tells the subscriber of `tracing`, if there is one, what changed.
#[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "nobody to tell"))]
pub(crate) fn event(event: &Event) {
    #[cfg(feature = "tracing")]
    match event {
        Event::Promoted(key, rule, finding, after) => tracing::info!(
            target: "heatsink",
            key = %key,
            rule = %rule,
            reads_per_sec = finding.demand.reads_per_sec,
            writes_per_sec = finding.demand.writes_per_sec,
            after_ms = after.as_secs_f64() * 1e3,
            why = %finding.why,
            decision = %finding.decision,
            "hot key promoted"
        ),
        Event::Treated(key, finding) => tracing::info!(
            target: "heatsink",
            key = %key,
            why = %finding.why,
            decision = %finding.decision,
            "hot key treated anew"
        ),
        Event::Demoted(key, finding) => tracing::info!(
            target: "heatsink",
            key = %key,
            why = %finding.why,
            "hot key demoted"
        ),
    }
}

/// Hands the numbers to the recorder of `metrics`, if there is one; at every finished window.
#[cfg(feature = "metrics")]
pub(crate) fn publish(stats: &Stats) {
    use metrics::{counter, gauge};
    counter!("heatsink_hits_total", "freshness" => "fresh").absolute(stats.hits_fresh);
    counter!("heatsink_hits_total", "freshness" => "stale").absolute(stats.hits_stale);
    counter!("heatsink_misses_total").absolute(stats.misses);
    counter!("heatsink_loads_total").absolute(stats.loads);
    counter!("heatsink_loads_joined_total").absolute(stats.joined);
    counter!("heatsink_loads_overlapped_total").absolute(stats.overlapped);
    counter!("heatsink_loads_timed_out_total").absolute(stats.timed_out);
    counter!("heatsink_bypassed_total").absolute(stats.bypassed);
    counter!("heatsink_writes_total").absolute(stats.writes);
    counter!("heatsink_writes_unknown_total").absolute(stats.writes_unknown);
    counter!("heatsink_adds_total").absolute(stats.adds.adds);
    counter!("heatsink_adds_unknown_total").absolute(stats.adds.adds_unknown);
    counter!("heatsink_adds_held_total").absolute(stats.adds_held);
    counter!("heatsink_add_batches_total").absolute(stats.adds.batches);
    counter!("heatsink_flushes_total").absolute(stats.adds.flushes);
    counter!("heatsink_flushes_failed_total").absolute(stats.adds.flushes_failed);
    counter!("heatsink_adds_through_total").absolute(stats.adds.through);
    counter!("heatsink_adds_refused_total").absolute(stats.adds.refused);
    counter!("heatsink_adds_lost_total").absolute(stats.adds.lost);
    counter!("heatsink_lanes_taken_over_total").absolute(stats.adds.lanes_taken_over);
    counter!("heatsink_compactions_total").absolute(stats.adds.compactions);
    counter!("heatsink_promotions_total").absolute(stats.promotions);
    counter!("heatsink_demotions_total").absolute(stats.demotions);
    counter!("heatsink_samples_dropped_total").absolute(stats.samples_dropped);
    counter!("heatsink_windows_stalled_total").absolute(stats.windows_stalled);
    gauge!("heatsink_hot_keys").set(stats.hot_keys as f64);
    gauge!("heatsink_near_bytes").set(stats.near_bytes as f64);
    gauge!("heatsink_flips_max").set(f64::from(stats.flips_max));
    gauge!("heatsink_promoted_after_max_seconds").set(stats.promoted_after_max.as_secs_f64());
    gauge!("heatsink_served_age_max_seconds").set(stats.served_age_max.as_secs_f64());
    gauge!("heatsink_threshold_per_second").set(stats.threshold_per_sec);
    gauge!("heatsink_sampled_one_in").set(f64::from(stats.sampled_one_in));
    if let Some(ratio) = stats.store_operations_per_request() {
        gauge!("heatsink_store_operations_per_request").set(ratio);
    }
    if let Some(ratio) = stats.hottest_over_mean_shard {
        gauge!("heatsink_hottest_over_mean_shard").set(ratio);
    }
    #[cfg(feature = "feed")]
    if let Some(feed) = &stats.feed {
        publish_feed(feed);
    }
    for (shard, loads) in stats.loads_in_flight_by_shard.iter().enumerate() {
        let shard = shard.to_string();
        gauge!("heatsink_loads_in_flight", "shard" => shard).set(*loads as f64);
    }
}

#[cfg(all(feature = "metrics", feature = "feed"))]
fn publish_feed(feed: &crate::feed::FeedStats) {
    use metrics::{counter, gauge};
    let leads = if feed.leads { 1.0 } else { 0.0 };
    let in_force = if feed.edition.is_some() { 1.0 } else { 0.0 };
    gauge!("heatsink_feed_leads").set(leads);
    gauge!("heatsink_feed_list_in_force").set(in_force);
    gauge!("heatsink_feed_reporters").set(feed.reporters as f64);
    gauge!("heatsink_feed_delay_seconds").set(feed.delay.as_secs_f64());
    gauge!("heatsink_feed_applied_in_seconds").set(feed.applied_in.as_secs_f64());
    gauge!("heatsink_feed_unobeyed").set(feed.unobeyed as f64);
    counter!("heatsink_feed_keys_too_long_total").absolute(feed.keys_too_long);
    counter!("heatsink_feed_lists_applied_total").absolute(feed.lists.applied);
    counter!("heatsink_feed_lists_expired_total").absolute(feed.lists.expired);
    counter!("heatsink_feed_entries_skipped_total").absolute(feed.lists.skipped);
    for (refusal, n) in crate::feed::ALL_REFUSALS.iter().zip(feed.lists.refused) {
        let why = refusal.to_string();
        counter!("heatsink_feed_lists_refused_total", "why" => why).absolute(n);
    }
    counter!("heatsink_feed_reports_total").absolute(feed.reports.merged);
    counter!("heatsink_feed_reports_refused_total").absolute(feed.reports.refused);
    counter!("heatsink_feed_promotions_total").absolute(feed.reports.promotions);
    counter!("heatsink_feed_demotions_total").absolute(feed.reports.demotions);
    counter!("heatsink_feed_peers_refused_total").absolute(feed.peers_refused);
    counter!("heatsink_feed_lines_refused_total").absolute(feed.lines_refused);
    counter!("heatsink_feed_throttled_total").absolute(feed.throttled);
    counter!("heatsink_feed_slow_total").absolute(feed.slow);
    counter!("heatsink_feed_bytes_in_total").absolute(feed.bytes_in);
    counter!("heatsink_feed_bytes_out_total").absolute(feed.bytes_out);
    counter!("heatsink_feed_roots_read_total").absolute(feed.roots_read);
    counter!("heatsink_feed_roots_refused_total").absolute(feed.roots_refused);
    counter!("heatsink_feed_transport_errors_total").absolute(feed.transport_errors);
    counter!("heatsink_feed_elections_total").absolute(feed.elections);
}
