"""The demo: two trainings, one with a fault; recorded, judged, stopped and explained."""
